"""`llmc cache ls|show|verify|explain`: list the store, inspect and compare results or bundles, and check for damage."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llmc.buckets.render.text import counted, size_text
from llmc.cli.cache.common import age_text, bundle_folder, is_bundle, open_cache, print_json, show_value
from llmc.cli.options import Command, argument, flag, store_flag, switch
from llmc.cli.output import echo, print_table
from llmc.cli.results import origin_line
from llmc.errors import ArtifactError, InputError
from llmc.paths import is_dir
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.artifacts.key import Difference, Value
    from llmc.artifacts.overview.survey import Listed
    from llmc.artifacts.store.audit import StoreUsage
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.runtime.text.chat_format import ChatFormat


BAD_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class CacheShowCommand(Command):
    """Show what a stored result was made from and what it holds, or the contents of a bundle.

    \b
    Example:
      llmc cache show 3fa9c2
      llmc cache show ./smollm2-cpu
      llmc cache show ./smollm2-cpu --sbom > bundle.cdx.json
      llmc cache show 3fa9c2 --stablehlo
      llmc cache show ./smollm2-xla --executable "decode batch=4 context=512" --hlo -o decode.hlo_module.pb
    """

    what: str = argument("KEY | BUNDLE", "A key or its first digits; or a bundle: folder, archive, oci://….")
    sbom: bool = switch("--sbom", "Print a bundle's bill of materials (CycloneDX 1.6 JSON).")
    stablehlo: bool = switch("--stablehlo", "Print an executable's program as StableHLO (xla and tpu).")
    hlo: bool = switch("--hlo", "Write that program as an HLO module proto.")
    executable: str | None = flag(None, "GRAPH", 'The executable of a bundle: "decode batch=4", or a file name.')
    output: Path | None = flag(None, "FILE", "Write --stablehlo or --hlo to a file.", names="-o --output")
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        if sum((self.sbom, self.stablehlo, self.hlo)) > 1 or (self.as_json and (self.stablehlo or self.hlo)):
            raise InputError("--sbom, --stablehlo, --hlo and --json are different outputs: give one of them")
        if self.stablehlo or self.hlo:
            _show_program(self.what, self.cache_dir, self.executable, self.output, self.hlo)
            return
        if self.executable is not None or self.output is not None:
            raise InputError("--executable and --output need --stablehlo or --hlo: add one of them")
        if self.sbom:
            self._print_sbom()
            return
        if is_bundle(self.what):
            from llmc.artifacts.bundle.manifest import read_manifest

            store = open_cache(self.cache_dir)
            folder = bundle_folder(self.what, store)
            manifest = read_manifest(folder)
            if self.as_json:
                print_json(manifest.to_dict())
            else:
                origin = _origin(self.what, folder, None if self.cache_dir is None else store)
                _print_manifest(self.what, manifest, origin, _chat(folder))
            return
        entry = open_cache(self.cache_dir).find(self.what)
        if self.as_json:
            print_json(entry_json(entry))
        else:
            _print_entry(entry)

    def _print_sbom(self) -> None:
        from llmc.artifacts.bundle.manifest import read_manifest
        from llmc.artifacts.bundle.sbom import bill_of_materials
        from llmc.artifacts.bundle.stored import read_bundle

        store = open_cache(self.cache_dir)
        if is_bundle(self.what):
            manifest = read_manifest(bundle_folder(self.what, store))
        else:
            manifest, _ = read_bundle(store, store.find(self.what))
        print_json(bill_of_materials(manifest))


@dataclass(frozen=True, kw_only=True)
class CacheVerifyCommand(Command):
    """Check the store, or a bundle, for damage: read every byte and compare it with its digest.

    Damaged parts of the store are moved to quarantine and compiled again when needed. For a bundle the report also says
    who signed it. Exit status 5: something is damaged, or a signature is invalid.

    \b
    Example:
      llmc cache verify
      llmc cache verify ./smollm2-cpu --json
    """

    bundle: str | None = argument("[BUNDLE]", "A bundle: folder, archive, oci://…. Default: the store.", default=None)
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        said, extra = "", dict[str, object]()
        if self.bundle is not None:
            from llmc.api.signing import signature_status
            from llmc.artifacts.bundle.reader import BundleFiles
            from llmc.cli.cache.signing import signature_text

            files = BundleFiles.open(bundle_folder(self.bundle, open_cache(self.cache_dir)))
            errors = files.verify()
            signature, wrong = signature_status(files)
            errors += wrong
            checked = {"blobs": len(files.manifest.blobs), "bytes": files.manifest.size}
            said, extra = f"; {signature_text(signature)}", {"signature": signature}
            location = str(files.folder)
        else:
            store = open_cache(self.cache_dir)
            report = store.verify()
            errors = [f"{name}: {reason}" for name, reason in report.bad]
            checked = {"blobs": report.blobs, "bytes": report.bytes, "entries": report.entries}
            location = str(store.root)
        if self.as_json:
            print_json({"path": location, **checked, **extra, "bad": errors})
        else:
            echo(
                f"{location}: {counted(checked['blobs'], 'blob')}, {size_text(checked['bytes'])} read, "
                f"{len(errors)} damaged{said}"
            )
        if errors:
            shown = "\n  ".join(errors[:BAD_SHOWN])
            more = f"\n  and {len(errors) - BAD_SHOWN} more" if len(errors) > BAD_SHOWN else ""
            put_aside = "" if self.bundle is not None else "; moved to quarantine, compile again to replace it"
            raise ArtifactError(f"{location}: {len(errors)} damaged{put_aside}\n  {shown}{more}")


def _show_program(what: str, cache_dir: Path | None, executable: str | None, output: Path | None, hlo: bool) -> None:
    from llmc.artifacts.atomic_write import write_atomic
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.compiler.targets.xla import show as programs

    if hlo and output is None:
        raise InputError("--hlo writes a binary file: give its name with -o FILE")
    store = open_cache(cache_dir)
    if is_bundle(what):
        with BundleFiles.open(bundle_folder(what, store)) as files:
            envelope = programs.of_bundle(files, executable)
    else:
        envelope = programs.of_entry(store, store.find(what), executable)
    built = programs.hlo_proto(envelope) if hlo else programs.stablehlo_text(envelope).encode()
    if output is None:
        sys.stdout.buffer.write(built)
        sys.stdout.flush()
        return
    try:
        write_atomic(output, built, output.parent, durable=False)
    except OSError as error:
        raise InputError(f"{output} cannot be written ({error.strerror})") from error


def _print_entry(entry: Entry) -> None:
    echo(f"{entry.key.kind} {entry.key.digest}")
    created = f"created {age_text(entry.created)} ago, " if entry.created else ""
    echo(f"{created}used {age_text(entry.used)} ago, {size_text(entry.size)}")
    echo("\ncomponents")
    _print_members(entry.key.components)
    echo("\noutputs")
    for name, blob in entry.outputs.items():
        echo(f"  {name}: {blob.digest} ({size_text(blob.size)})")
    if entry.meta:
        echo("\nmeta")
        _print_members(entry.meta)


def _origin(what: str, folder: Path, store: Store | None) -> str | None:
    """Where the bundle's recorded verification comes from; None for a lone manifest file."""
    from llmc.artifacts.bundle.reader import BundleFiles

    if not is_dir(folder):
        return None
    with BundleFiles.open(folder) as files:
        return origin_line(what, files, store)


def _chat(folder: Path) -> ChatFormat | None:
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.runtime.text.chat_format import CHAT_FORMAT, ChatFormat

    if not is_dir(folder):
        return None
    with BundleFiles.open(folder) as files:
        return ChatFormat.read(files.read(CHAT_FORMAT)) if CHAT_FORMAT in files.manifest.files else None


def _print_manifest(path: str, manifest: Manifest, origin: str | None, chat: ChatFormat | None) -> None:
    states = [item.state for item in manifest.executables]
    buckets = sum(item.buckets for item in manifest.executables)
    echo(f"{path}: bundle for {manifest.device} ({manifest.target}, run by {manifest.executor})")
    echo(
        f"{counted(len(states), 'executable')} ({states.count('native')} native, {states.count('portable')} portable) "
        f"for {counted(buckets, 'bucket')}; {counted(len(manifest.blobs), 'blob')}, {size_text(manifest.size)}; "
        f"llmc {manifest.llmc}"
    )
    if origin is not None:
        echo(origin)
    if chat is not None:
        echo(f"chat: {chat}")
    for title in ("model", "options", "toolchain", "verification", "provenance", "summary"):
        members = getattr(manifest, title)
        if title == "provenance":
            members = {name: value for name, value in members.items() if not isinstance(value, Mapping)}
        if members:
            echo(f"\n{title}")
            _print_members(members)
    echo("\nfiles")
    for name, digest in sorted(manifest.files.items()):
        echo(f"  {name}: {digest} ({size_text(manifest.blobs[digest])})")
    echo("\nexecutables")
    rows = [
        (str(item), item.state, str(item.buckets), size_text(manifest.blobs[item.blob]), item.key[7:19])
        for item in manifest.executables
    ]
    print_table(("GRAPH", "STATE", "BUCKETS", "SIZE", "KEY"), rows)


def _print_members(members: Mapping[str, Any]) -> None:
    for name, value in sorted(members.items()):
        echo(f"  {name}: {show_value(value)}")


SUMMARY_WIDTH = 90
ORDER = {"cache": -3, "model": -2, "version": -1, "shape": -1, "input": 1, "option": 1, "toolchain": 2, "isa": 3}
"""Sort order of component groups: distinctive ones first, those that most entries share last."""
TITLES = ("KIND", "KEY", "SIZE", "OWN", "SHARED", "USED", "STATE", "COMPONENTS")


@dataclass(frozen=True, kw_only=True)
class CacheListCommand(Command):
    """List the store's entries: kind, key, size, time since last use, and what they were made from.

    OWN is the size that is freed with the entry, SHARED the size that other entries also use. Entries that are pinned
    or in use are never collected. --plot draws where the bytes are; an .html also lists bundles, pins and what llmc
    cache gc would remove first.

    \b
    Example:
      llmc cache ls
      llmc cache ls --plot store.html
      llmc cache ls --kind bundle
      llmc cache ls --kind executable --json
    """

    kind: str | None = flag(None, "KIND", "List only entries of this kind.")
    plot: Path | None = flag(None, "OUT", "Draw the whole store: a .png, or a self-contained .html.")
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.artifacts.overview.survey import take

        if self.plot is not None:
            from llmc.buckets.render.page import check

            check(self.plot)
        survey = take(open_cache(self.cache_dir))
        if self.plot is not None:
            from llmc.artifacts.overview import draw
            from llmc.artifacts.signing.keyring import Keyring

            draw(self.plot, survey, Keyring.from_settings(Settings.from_environment()), _summary)
            echo(f"wrote {self.plot}", err=True)
            if not self.as_json:
                return
        listed = [one for one in survey.entries if self.kind in (None, one.entry.key.kind)]
        if self.as_json:
            print_json(
                {
                    "root": str(survey.root),
                    "usage": survey.usage._asdict() | {"total": survey.usage.total},
                    "entries": [_as_json(one) for one in listed],
                }
            )
            return
        print_table(TITLES, map(_row, listed))
        echo(f"{counted(len(listed), 'entry', 'entries')}; {_usage_text(survey.usage, survey.root)}")


def entry_json(entry: Entry) -> dict[str, Any]:
    """Convert a store entry to JSON members."""
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


def _row(listed: Listed) -> tuple[str, ...]:
    key, share = listed.entry.key, listed.share
    marks = ", ".join(name for name, holds in (("pinned", listed.pinned), ("in use", listed.in_use)) if holds)
    sizes = (size_text(share.size), size_text(share.own), size_text(share.shared))
    return key.kind, key.short, *sizes, age_text(listed.used), marks, _summary(listed.entry)


def _as_json(listed: Listed) -> dict[str, Any]:
    share = listed.share
    facts = {"size": share.size, "own": share.own, "shared": share.shared}
    state = {"pinned": listed.pinned, "in_use": listed.in_use, "used": listed.used}
    return {**entry_json(listed.entry), **facts, **state}


def _usage_text(usage: StoreUsage, root: Path) -> str:
    """Total disk usage, and how much of it is neither entries nor blobs."""
    others = ((usage.bundle_bytes, "bundle folders only"), (usage.other_bytes, "quarantine and temporaries"))
    rest = ", ".join(f"{size_text(size)} of it in {what}" for size, what in others if size)
    return f"{counted(usage.blobs, 'blob')}, {size_text(usage.total)} on disk in {root}" + (f"; {rest}" if rest else "")


def _summary(entry: Entry) -> str:
    from llmc.artifacts.bundle.stored import KIND
    from llmc.artifacts.digest import is_digest

    if entry.key.kind == KIND:
        model, device, count = (entry.meta.get(name, "?") for name in ("model", "device", "executables"))
        text = f"{model or 'a model'} for {device}, {count} executables"
    else:
        items = sorted(entry.key.components.items(), key=lambda item: ORDER.get(item[0].partition(".")[0], 0))
        text = " ".join(
            f"{name}={show_value(value)}" for name, value in items if not is_digest(value) and name != "code"
        )
    return text if len(text) <= SUMMARY_WIDTH else text[: SUMMARY_WIDTH - 1] + "…"


LINES_SHOWN = 20
FILES_SHOWN = 3
BUNDLES_COMPARED = 32


class _Subject(NamedTuple):
    """One side of a comparison. `digest` tells it from others; `files` are the digests of a packed cache's files by
    path."""

    name: str
    kind: str
    digest: str
    components: Mapping[str, Value]
    files: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class CacheExplainCommand(Command):
    """Explain a cache miss: print which key components make two stored results, or two bundles, differ.

    With A alone, the store's most similar entry of the same kind, or bundle, is the other side. For two packed caches
    it prints the facts that differ (version, GPU, dtype, sizes) and how many files do. To see why a compile would
    rebuild something, use llmc compile --dry-run or -v.

    \b
    Example:
      llmc cache explain 3fa9c2 77b01e
      llmc cache explain 3fa9c2
      llmc cache explain ./smollm2-old ./smollm2-new --json
    """

    a: str = argument("A", "A key or its first digits, or a bundle folder.")
    b: str | None = argument("[B]", "The other side. Default: the most similar one in the store.", default=None)
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        store = open_cache(self.cache_dir)
        one = _subject(store, self.a)
        if self.b is None:
            _print_nearest(store, one, self.as_json)
            return
        other = _subject(store, self.b)
        if (one.kind == "bundle") != (other.kind == "bundle"):
            raise InputError(f"compare two keys or two bundles, not {self.a} ({one.kind}) with {self.b} ({other.kind})")
        found = _differences(one, other)
        if self.as_json:
            print_json(
                {
                    "a": self.a,
                    "b": self.b,
                    "differences": [_difference_json(item) for item in found],
                    **_files(one, other),
                }
            )
        else:
            _print(found)
            _print_files(one, other)


def _print_nearest(store: Store, subject: _Subject, as_json: bool) -> None:
    near = _nearest(store, subject)
    found = [] if near is None else _differences(near, subject)
    if as_json:
        name = None if near is None else near.name
        files = {} if near is None else _files(near, subject)
        print_json({"a": name, "b": subject.name, "differences": [_difference_json(item) for item in found], **files})
    elif near is None:
        echo(f"{store.root} has no other {subject.kind} to compare it with")
    else:
        echo(f"from {near.kind} {near.name}, the nearest, to {subject.name}:")
        _print(found)
        _print_files(near, subject)


def _subject(store: Store, text: str) -> _Subject:
    from llmc.artifacts.bundle.manifest import manifest_components, read_manifest
    from llmc.artifacts.bundle.stored import KIND, read_bundle

    if is_bundle(text):
        manifest = read_manifest(bundle_folder(text, store))
        return _Subject(text, KIND, manifest.digest, manifest_components(manifest))
    entry = store.find(text)
    if entry.key.kind == KIND:
        manifest, _ = read_bundle(store, entry)
        return _Subject(entry.key.digest, KIND, manifest.digest, manifest_components(manifest))
    return _Subject(entry.key.digest, entry.key.kind, entry.key.digest, entry.key.components, _tree(entry))


def _tree(entry: Entry) -> Mapping[str, str]:
    from llmc.artifacts.third_party.contents import KIND, TREE

    if entry.key.kind != KIND:
        return {}
    return {name.removeprefix(TREE): blob.digest for name, blob in entry.outputs.items() if name.startswith(TREE)}


def _nearest(store: Store, subject: _Subject) -> _Subject | None:
    """The stored bundle, or the entry of the same kind, with the fewest differing components."""
    from llmc.artifacts.bundle.stored import KIND
    from llmc.artifacts.key import Key

    if subject.kind != KIND:
        near = store.nearest(Key(subject.kind, subject.components))
        return None if near is None else _subject(store, near[0].key.digest)
    others = []
    for entry in store.entries(KIND)[:BUNDLES_COMPARED]:
        try:
            other = _subject(store, entry.key.digest)
        except ArtifactError:  # skip damaged bundles; `llmc cache verify` reports them
            continue
        if other.digest != subject.digest:
            others.append(other)
    return min(others, key=lambda other: len(_differences(other, subject)), default=None)


def _differences(one: _Subject, other: _Subject) -> list[Difference]:
    """Those of single executables and of a cache's files come last."""
    from llmc.artifacts.key import Difference, differences

    found = [] if one.kind == other.kind else [Difference("kind", one.kind, other.kind)]
    return sorted(
        [*found, *differences(one.components, other.components)],
        key=lambda item: "[" in item.name or item.name == "tree",
    )


def _print(found: list[Difference]) -> None:
    from llmc.artifacts.key import changed_code

    for item in found[:LINES_SHOWN]:
        modules = changed_code(item)
        shown = f"{show_value(item.mine)} → {show_value(item.theirs)}"
        echo(f"{item.name}: {', '.join(modules) or shown}")
    if len(found) > LINES_SHOWN:
        echo(f"and {len(found) - LINES_SHOWN} more; --json lists all")
    if not found:
        echo("no component differs")


def _files(one: _Subject, other: _Subject) -> dict[str, Any]:
    if not one.files or not other.files:
        return {}
    common = one.files.keys() & other.files.keys()
    found = {
        "differ": [name for name in common if one.files[name] != other.files[name]],
        "only_a": one.files.keys() - other.files.keys(),
        "only_b": other.files.keys() - one.files.keys(),
    }
    return {"files": {side: sorted(names) for side, names in found.items()}}


def _print_files(one: _Subject, other: _Subject) -> None:
    for side, names in _files(one, other).get("files", {}).items():
        if names:
            words = {"differ": "with different content", "only_a": "only in A", "only_b": "only in B"}[side]
            shown = ", ".join(names[:FILES_SHOWN]) + (" …" if len(names) > FILES_SHOWN else "")
            echo(f"{len(names)} {words}: {shown}")


def _difference_json(item: Difference) -> dict[str, Any]:
    """The difference as JSON; a side without the component has no member."""
    from llmc.artifacts.key import Absent, changed_code

    sides, modules = (("a", item.mine), ("b", item.theirs)), changed_code(item)
    found = {"name": item.name, **{side: value for side, value in sides if not isinstance(value, Absent)}}
    return found | ({"modules": modules} if modules else {})
