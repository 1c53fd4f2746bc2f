"""`llmc cache show|verify`: what a key or a bundle consists of, and whether it is intact."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmc.buckets.render.text import size_text
from llmc.cli.cache.common import (
    CacheDirFlag,
    JsonFlag,
    age_text,
    bundle_folder,
    is_bundle,
    open_cache,
    print_json,
    print_table,
    show_value,
)
from llmc.cli.cache.listing import entry_json
from llmc.cli.options import option
from llmc.cli.output import echo
from llmc.errors import ArtifactError, InputError
from llmc.paths import is_dir

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store

BAD_SHOWN = 5


def show(
    what: Annotated[
        str,
        typer.Argument(
            metavar="KEY | BUNDLE", help="A key, or its first digits; or a bundle: folder, archive, oci://…."
        ),
    ],
    sbom: Annotated[
        bool, typer.Option("--sbom", help="Print a bundle's bill of materials: a CycloneDX 1.6 document, in JSON.")
    ] = False,
    stablehlo: Annotated[
        bool, typer.Option("--stablehlo", help="Print the program of an executable for xla or tpu, as StableHLO.")
    ] = False,
    hlo: Annotated[
        bool, typer.Option("--hlo", help="Write that program as an HLO module proto, for compilers that read those.")
    ] = False,
    executable: Annotated[
        str | None,
        option("--executable", "GRAPH", 'Which executable of a bundle: "decode batch=4", or a file\'s name.'),
    ] = None,
    output: Annotated[Path | None, option("-o --output", "FILE", "Write --stablehlo or --hlo to a file.")] = None,
    cache_dir: CacheDirFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the components and outputs of a stored result, or what a bundle consists of.

    \b
    Example:
      llmc cache show 3fa9c2
      llmc cache show ./smollm2-cpu
      llmc cache show ./smollm2-cpu --sbom > bundle.cdx.json
      llmc cache show 3fa9c2 --stablehlo
      llmc cache show ./smollm2-xla --executable "decode batch=4 context=512" --hlo -o decode.hlo_module.pb
    """
    if sum((sbom, stablehlo, hlo)) > 1 or (as_json and (stablehlo or hlo)):
        raise InputError("--sbom, --stablehlo, --hlo and --json are different things to show: give one of them")
    if stablehlo or hlo:
        _show_program(what, cache_dir, executable, output, hlo)
        return
    if executable is not None or output is not None:
        raise InputError("--executable and --output belong to --stablehlo or --hlo: add one of them")
    if sbom:
        from llmc.cli.cache.sbom import print_sbom

        print_sbom(what, cache_dir)
        return
    if is_bundle(what):
        from llmc.artifacts.bundle.manifest import read_manifest

        store = open_cache(cache_dir)
        folder = bundle_folder(what, store)
        manifest = read_manifest(folder)
        if as_json:
            print_json(manifest.to_dict())
        else:
            _print_manifest(what, manifest, _origin(what, folder, None if cache_dir is None else store))
        return
    entry = open_cache(cache_dir).find(what)
    if as_json:
        print_json(entry_json(entry))
    else:
        _print_entry(entry)


def verify(
    bundle: Annotated[
        str | None,
        typer.Argument(
            metavar="[BUNDLE]", help="A bundle: folder, archive, oci://…. Default: the store.", show_default=False
        ),
    ] = None,
    cache_dir: CacheDirFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Read every byte of the store, or of a bundle, and compare it with its digest.

    What is damaged in the store goes into quarantine, and is compiled again when it is next needed. Of a bundle it
    says who signed it, too. Exit status 5 when anything was damaged, or a signature is not valid.

    \b
    Example:
      llmc cache verify
      llmc cache verify ./smollm2-cpu --json
    """
    said, extra = "", dict[str, object]()
    if bundle is not None:
        from llmc.artifacts.bundle.reader import BundleFiles
        from llmc.cli.cache.sign import signature_status, signature_text

        files = BundleFiles.open(bundle_folder(bundle, open_cache(cache_dir)))
        errors = files.verify()
        signature, wrong = signature_status(files)
        errors += wrong
        checked = {"blobs": len(files.manifest.blobs), "bytes": files.manifest.size}
        said, extra = f"; {signature_text(signature)}", {"signature": signature}
        place = str(files.folder)
    else:
        store = open_cache(cache_dir)
        report = store.verify()
        errors = [f"{name}: {reason}" for name, reason in report.bad]
        checked = {"blobs": report.blobs, "bytes": report.bytes, "entries": report.entries}
        place = str(store.root)
    if as_json:
        print_json({"path": place, **checked, **extra, "bad": errors})
    else:
        echo(f"{place}: {checked['blobs']} blobs, {size_text(checked['bytes'])} read, {len(errors)} damaged{said}")
    if errors:
        shown = "\n  ".join(errors[:BAD_SHOWN])
        more = f"\n  and {len(errors) - BAD_SHOWN} more" if len(errors) > BAD_SHOWN else ""
        put_aside = "" if bundle is not None else "; put into quarantine, compiling again heals it"
        raise ArtifactError(f"{place}: {len(errors)} damaged{put_aside}\n  {shown}{more}")


def _show_program(what: str, cache_dir: Path | None, executable: str | None, output: Path | None, hlo: bool) -> None:
    from llmc.artifacts.atomic_write import write_atomic
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.compiler.targets.xla import show as programs

    if hlo and output is None:
        raise InputError("--hlo writes a binary file: name it with -o")
    store = open_cache(cache_dir)
    if is_bundle(what):
        with BundleFiles.open(bundle_folder(what, store)) as files:
            envelope = programs.of_bundle(files, executable)
    else:
        envelope = programs.of_entry(store, store.find(what), executable)
    made = programs.hlo_proto(envelope) if hlo else programs.stablehlo_text(envelope).encode()
    if output is None:
        sys.stdout.buffer.write(made)
        sys.stdout.flush()
        return
    try:
        write_atomic(output, made, output.parent, durable=False)
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
    """Where the outcome that a bundle records comes from; of a manifest's file alone there is nothing to say."""
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.cli.accuracy import origin_line

    if not is_dir(folder):
        return None
    with BundleFiles.open(folder) as files:
        return origin_line(what, files, store)


def _print_manifest(path: str, manifest: Manifest, origin: str | None) -> None:
    states = [item.state for item in manifest.executables]
    buckets = sum(item.buckets for item in manifest.executables)
    echo(f"{path}: bundle for {manifest.device} ({manifest.target}, run by {manifest.executor})")
    echo(
        f"{len(states)} executables ({states.count('native')} native, {states.count('portable')} portable) "
        f"for {buckets} buckets; {len(manifest.blobs)} blobs, {size_text(manifest.size)}; llmc {manifest.llmc}"
    )
    if origin is not None:
        echo(origin)
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


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("show")(show)
    app.command("verify")(verify)
