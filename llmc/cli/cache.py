"""`llmc cache`: what the artifact store holds, whether it is intact, and why something was compiled again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmc.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from llmc.artifacts.entries import Entry
    from llmc.artifacts.key import Difference
    from llmc.artifacts.manifest import Manifest
    from llmc.artifacts.store import Store

SUMMARY_WIDTH = 90
BAD_SHOWN = 5

app = typer.Typer(
    help="Look into the artifact store and into bundles.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

CacheDirFlag = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        help="The artifact store. Default: LLMC_CACHE_DIR, or the user's cache folder.",
        show_default=False,
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("ls")
def list_entries(
    kind: Annotated[str | None, typer.Option("--kind", metavar="KIND", help="Only entries of this kind.")] = None,
    cache_dir: CacheDirFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """List what is stored: kind, key, size, time since it was used, and what it was made from.

    \b
    Example:
      llmc cache ls
      llmc cache ls --kind executable --json
    """
    store = _store(cache_dir)
    entries = store.entries(kind)
    usage = store.usage()
    if as_json:
        _print_json(
            {
                "root": str(store.root),
                "usage": usage._asdict(),
                "entries": [_entry_json(entry) for entry in entries],
            }
        )
        return
    rows = [(item.key.kind, item.key.short, _size(item.size), _age(item.used), _summary(item)) for item in entries]
    _print_table(("KIND", "KEY", "SIZE", "USED", "COMPONENTS"), rows)
    typer.echo(
        f"{len(entries)} entries; {usage.blobs} blobs, {_size(usage.blob_bytes)} in {store.root}"
        + (f"; {_size(usage.other_bytes)} in quarantine and temporaries" if usage.other_bytes else "")
    )


@app.command("show")
def show(
    what: Annotated[
        str,
        typer.Argument(metavar="KEY | BUNDLE", help="A key, or its first digits; or a bundle folder."),
    ],
    cache_dir: CacheDirFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the components and outputs of a stored result, or what a bundle consists of.

    \b
    Example:
      llmc cache show 3fa9c2
      llmc cache show ./smollm2-cpu
    """
    if _is_bundle(what):
        from llmc.artifacts.manifest import read_manifest

        manifest = read_manifest(what)
        if as_json:
            _print_json(manifest.to_dict())
        else:
            _print_manifest(what, manifest)
        return
    entry = _store(cache_dir).find(what)
    if as_json:
        _print_json(_entry_json(entry))
    else:
        _print_entry(entry)


@app.command("verify")
def verify(
    bundle: Annotated[
        str | None,
        typer.Argument(metavar="[BUNDLE]", help="A bundle folder. Default: the store.", show_default=False),
    ] = None,
    cache_dir: CacheDirFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Read every byte of the store, or of a bundle, and compare it with its digest.

    What is damaged in the store goes into quarantine, and is compiled again when it is next needed. Exit
    status 5 when anything was damaged.

    \b
    Example:
      llmc cache verify
      llmc cache verify ./smollm2-cpu --json
    """
    if bundle is not None:
        from llmc.artifacts.bundle import BundleFiles

        files = BundleFiles.open(bundle)
        errors = files.verify()
        checked = {"blobs": len(files.manifest.blobs), "bytes": files.manifest.size}
        place = str(files.folder)
    else:
        store = _store(cache_dir)
        report = store.verify()
        errors = [f"{name}: {reason}" for name, reason in report.bad]
        checked = {"blobs": report.blobs, "bytes": report.bytes, "entries": report.entries}
        place = str(store.root)
    if as_json:
        _print_json({"path": place, **checked, "bad": errors})
    else:
        typer.echo(f"{place}: {checked['blobs']} blobs, {_size(checked['bytes'])} read, {len(errors)} damaged")
    if errors:
        shown = "\n  ".join(errors[:BAD_SHOWN])
        more = f"\n  and {len(errors) - BAD_SHOWN} more" if len(errors) > BAD_SHOWN else ""
        put_aside = "" if bundle is not None else "; put into quarantine, compiling again heals it"
        raise ArtifactError(f"{place}: {len(errors)} damaged{put_aside}\n  {shown}{more}")


@app.command("explain")
def explain(
    a: Annotated[str, typer.Argument(metavar="A", help="A key, or its first digits; or a bundle folder.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What to compare it with, of the same sort.")],
    cache_dir: CacheDirFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Print which components make two keys, or two bundles, differ: why B was not taken for A.

    \b
    Example:
      llmc cache explain 3fa9c2 77b01e
      llmc cache explain ./smollm2-old ./smollm2-new --json
    """
    if _is_bundle(a) != _is_bundle(b):
        raise InputError(f"compare two keys or two bundles, not {a} with {b}")
    found = _compare_bundles(a, b) if _is_bundle(a) else _compare_keys(_store(cache_dir), a, b)
    if as_json:
        _print_json({"a": a, "b": b, "differences": [_difference_json(item) for item in found]})
        return
    for name, mine, theirs in found:
        typer.echo(f"{name}: {_show(mine)} → {_show(theirs)}")
    if not found:
        typer.echo("no component differs")


def _store(cache_dir: Path | None) -> Store:
    from llmc.artifacts.store import Store

    if cache_dir is None:
        from llmc.settings import Settings

        cache_dir = Settings.from_environment().cache_dir
    return Store(cache_dir)


def _is_bundle(text: str) -> bool:
    """Whether an argument is a path; anything that does not look like one is a key."""
    return os.sep in text or Path(text).is_dir()


def _compare_keys(store: Store, a: str, b: str) -> list[Difference]:
    return store.find(a).key.explain(store.find(b).key)


def _compare_bundles(a: str, b: str) -> list[Difference]:
    from llmc.artifacts.compare import manifest_components
    from llmc.artifacts.key import differences
    from llmc.artifacts.manifest import read_manifest

    return list(differences(manifest_components(read_manifest(a)), manifest_components(read_manifest(b))))


def _difference_json(item: Difference) -> dict[str, Any]:
    """The difference; a side that does not have the component has no member for it."""
    from llmc.artifacts.key import Absent

    sides = (("a", item.mine), ("b", item.theirs))
    return {"name": item.name, **{side: value for side, value in sides if not isinstance(value, Absent)}}


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {
        "kind": entry.key.kind,
        "key": entry.key.digest,
        "size": entry.size,
        "created": entry.created,
        "used": entry.used,
        "components": dict(entry.key.components),
        "outputs": {name: blob._asdict() for name, blob in entry.outputs.items()},
        "meta": dict(entry.meta),
    }


def _print_entry(entry: Entry) -> None:
    typer.echo(f"{entry.key.kind} {entry.key.digest}")
    typer.echo(f"created {_age(entry.created)} ago, used {_age(entry.used)} ago, {_size(entry.size)}")
    typer.echo("\ncomponents")
    _print_members(entry.key.components)
    typer.echo("\noutputs")
    for name, blob in entry.outputs.items():
        typer.echo(f"  {name}: {blob.digest} ({_size(blob.size)})")
    if entry.meta:
        typer.echo("\nmeta")
        _print_members(entry.meta)


def _print_manifest(path: str, manifest: Manifest) -> None:
    states = [item.state for item in manifest.executables]
    buckets = sum(item.buckets for item in manifest.executables)
    typer.echo(f"{path}: bundle for {manifest.device} ({manifest.target}, run by {manifest.executor})")
    typer.echo(
        f"{len(states)} executables ({states.count('native')} native, {states.count('portable')} portable) "
        f"for {buckets} buckets; {len(manifest.blobs)} blobs, {_size(manifest.size)}; llmc {manifest.llmc}"
    )
    for title in ("model", "options", "toolchain", "verification", "provenance", "summary"):
        members = getattr(manifest, title)
        if members:
            typer.echo(f"\n{title}")
            _print_members(members)
    typer.echo("\nfiles")
    for name, digest in sorted(manifest.files.items()):
        typer.echo(f"  {name}: {digest} ({_size(manifest.blobs[digest])})")
    typer.echo("\nexecutables")
    rows = [
        (str(item), item.state, str(item.buckets), _size(manifest.blobs[item.blob]), item.key[7:19])
        for item in manifest.executables
    ]
    _print_table(("GRAPH", "STATE", "BUCKETS", "SIZE", "KEY"), rows)


def _print_members(members: Mapping[str, Any]) -> None:
    for name, value in sorted(members.items()):
        typer.echo(f"  {name}: {_show(value)}")


def _print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns apart by two spaces; the last one is not padded."""
    table = [titles, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(titles) - 1)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        typer.echo("  ".join([*cells, row[-1]]).rstrip())


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, sort_keys=True))


def _show(value: object) -> str:
    """A value for people: text as it is, anything else as JSON."""
    from llmc.artifacts.key import Absent

    if isinstance(value, str) and value.isprintable():
        return value
    return repr(value) if isinstance(value, Absent) else json.dumps(value, sort_keys=True)


def _summary(entry: Entry) -> str:
    """The components that are not digests, on one line."""
    from llmc.artifacts.digest import is_digest

    items = entry.key.components.items()
    text = " ".join(f"{name}={_show(value)}" for name, value in items if not is_digest(value))
    return text if len(text) <= SUMMARY_WIDTH else text[: SUMMARY_WIDTH - 1] + "…"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _age(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def register(root: typer.Typer) -> None:
    """Add the command group to `root`."""
    root.add_typer(app, name="cache")
