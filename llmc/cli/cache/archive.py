"""`llmc cache export|import`: bundles, or the whole store, as one file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmc.buckets.warmup.sizes import size_text
from llmc.cli.cache.common import (
    CacheDirFlag,
    JsonFlag,
    bundle_folder,
    count_text,
    is_bundle,
    open_cache,
    print_json,
)
from llmc.cli.options import option
from llmc.cli.output import echo
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.artifacts.archives.reader import Imported
    from llmc.artifacts.archives.writer import Contents, Item
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store

STREAM = "-"


def export_command(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The archive: .tar, or .tar.zst to compress it; - for stdout.")
    ],
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY | BUNDLE]...",
            help="Keys, or their first digits; bundle folders. Default: all that is in the store.",
            show_default=False,
        ),
    ] = None,
    level: Annotated[
        int | None, option("--level", "N", "How hard zstd works, 1 to 19. Default: 3.", show_default=False)
    ] = None,
    cache_dir: CacheDirFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Write bundles, or what is in the store, into one archive: the same bytes wherever and whenever it is made.

    An archive of one bundle is a bundle folder when `tar xf` unpacks it, and can be named wherever a bundle is asked
    for. The file appears whole, or not at all.

    \b
    Example:
      llmc cache export smollm2-cpu.tar.zst ./smollm2-cpu
      llmc cache export store.tar
      llmc cache export - ./smollm2-cpu | ssh host llmc cache import - -o smollm2-cpu
    """
    from llmc.artifacts.archives.writer import write_archive
    from llmc.cli.output import TransferProgress

    if as_json and file == STREAM:
        raise InputError("--json and the archive cannot both go to standard output; name a file")
    contents = _contents(open_cache(cache_dir), what)
    with TransferProgress("export") as progress:
        dest = sys.stdout.buffer if file == STREAM else Path(file)
        done = write_archive(contents, dest, level=level, progress=progress)
    if as_json:
        print_json({"file": file, **done._asdict()})
        return
    squeezed = f", written as {size_text(done.written)}" if done.written != done.bytes else ""
    text = (
        f"exported {count_text(done.entries, 'entry', 'entries')} to {file}: {count_text(done.blobs, 'blob', 'blobs')}"
    )
    echo(f"{text}, {size_text(done.bytes)}{squeezed} in {done.seconds:.1f} s", err=file == STREAM)


def import_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="An archive of llmc cache export; - for stdin.")],
    output: Annotated[
        Path | None, option("--output -o", "FOLDER", "Make this folder the bundle in the archive.", show_default=False)
    ] = None,
    require_signature: Annotated[
        bool, typer.Option("--require-signature", help="Refuse what no key that is trusted here has signed.")
    ] = False,
    allow_unsigned: Annotated[
        bool, typer.Option("--allow-unsigned", help="Take native code without a signature by a trusted key.")
    ] = False,
    cache_dir: CacheDirFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Bring everything in an archive into the store, verified to the last byte; all of it, or nothing.

    What the store has already stays as it is. Native code has to be signed by a key that is trusted here (see
    `llmc cache trust`); --require-signature or LLMC_REQUIRE_SIGNATURES ask for that of everything. A signature that
    is there has to be right. Exit status 5 when the archive is damaged or not trusted.

    \b
    Example:
      llmc cache import smollm2-cpu.tar.zst
      llmc cache import smollm2-cpu.tar.zst -o ./smollm2-cpu --require-signature
    """
    from llmc.artifacts.archives.reader import import_archive
    from llmc.artifacts.signing.keyring import Keyring
    from llmc.cli.output import TransferProgress
    from llmc.settings import Settings

    settings = Settings.from_environment()
    store = open_cache(cache_dir)
    required = require_signature or settings.require_signatures
    trust = Keyring.from_settings(settings, allow_unsigned)
    if file == STREAM:
        done = import_archive(store, sys.stdin.buffer, trust=trust, required=required)
    else:
        with TransferProgress("import") as progress:
            done = import_archive(store, Path(file), trust=trust, required=required, progress=progress)
    folder = None if output is None else _checkout(store, done, file, output)
    _print_imported(done, file, folder, as_json)


def _contents(store: Store, what: list[str] | None) -> Contents:
    from llmc.artifacts.archives.writer import bundle_contents, entry_contents
    from llmc.artifacts.bundle.stored import KIND
    from llmc.artifacts.store.entries import Entry

    if what is None:
        return entry_contents(store, _whole(store))
    items = [_item(store, text) for text in what]
    if len(items) == 1 and not (isinstance(items[0], Entry) and items[0].key.kind != KIND):
        return bundle_contents(store, items[0])
    return entry_contents(store, items)


def _item(store: Store, text: str) -> Item:
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.artifacts.local.references import STORE, find_bundle

    if text.startswith(STORE):
        return find_bundle(store, text.removeprefix(STORE))
    return BundleFiles.open(bundle_folder(text, store)) if is_bundle(text) else store.find(text)


def _whole(store: Store) -> list[Entry]:
    """All results of the store that can leave this machine; incomplete ones are left out, with a message."""
    travels = [entry for entry in store.entries() if not entry.key.is_local]
    complete = [entry for entry in travels if all(store.has(blob) for blob in entry.outputs.values())]
    if not complete:
        raise InputError(f"there is nothing to export in {store.root}; name bundle folders, or another --cache-dir")
    if len(complete) != len(travels):
        lost = count_text(len(travels) - len(complete), "entry", "entries")
        echo(f"llmc: left out {lost} whose blobs are missing or damaged; see `llmc cache verify`", err=True)
    return complete


def _checkout(store: Store, done: Imported, file: str, output: Path) -> Path:
    from llmc.artifacts.bundle.stored import KIND, checkout

    bundles = [entry for entry in done.entries if entry.key.kind == KIND]
    if len(bundles) != 1:
        raise InputError(
            f"{file}: imported, but -o needs one bundle, and there are {len(bundles)} in it; export store:KEY alone"
        )
    return checkout(store, bundles[0], output)


def _print_imported(done: Imported, file: str, folder: Path | None, as_json: bool) -> None:
    if as_json:
        found: dict[str, Any] = {"file": file, **done._asdict()}
        found["entries"] = [{"kind": entry.key.kind, "key": entry.key.digest} for entry in done.entries]
        if folder is not None:
            found["bundle"] = str(folder)
        print_json(found)
        return
    entries = f"{count_text(len(done.entries), 'entry', 'entries')} ({done.new_entries} new)"
    blobs = f"{count_text(done.blobs, 'blob', 'blobs')}, {size_text(done.bytes)}"
    new = f"{done.new_blobs} new, {size_text(done.new_bytes)}"
    echo(f"imported {entries} from {file}: {blobs} ({new}) in {done.seconds:.1f} s")
    if folder is not None:
        echo(f"bundle: {folder}")


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("export")(export_command)
    app.command("import")(import_command)
