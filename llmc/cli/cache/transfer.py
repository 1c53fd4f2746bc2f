"""`llmc cache push|pull|export|import`: share what is compiled, by a folder, object store, registry or file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmc.buckets.render.text import size_text
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
from llmc.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from llmc.artifacts.remotes.base import TransferReport
    from llmc.artifacts.signing.keyring import Keyring
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store

SHOWN = 5
STREAM = "-"

UrlArgument = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="A folder; s3://BUCKET/FOLDER, gs://, hf:// and what else fsspec knows; "
        "or, for one bundle or packed cache, oci://HOST/NAME:TAG or oci-layout:FOLDER:TAG.",
    ),
]
KindFlag = Annotated[str | None, option("--kind", "KIND", "Only entries of this kind.")]
JobsFlag = Annotated[int | None, option("--jobs", "N", "Blobs that are moved at once. Default: 8.", min=1)]


def push(
    url: UrlArgument,
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY | BUNDLE",
            help="Keys, or their first digits; bundle folders. Default: all that is in the store.",
            show_default=False,
        ),
    ] = None,
    kind: KindFlag = None,
    key: Annotated[
        Path | None,
        option("--key", "FILE", "Sign with this private key. Default: LLMC_SIGNING_KEY.", show_default=False),
    ] = None,
    jobs: JobsFlag = None,
    cache_dir: CacheDirFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Bring what is in the store to a remote; only what is missing there is moved.

    A transfer that was cut off goes on when it is started again. Exit status 5 when the remote failed, or when
    something in the store was damaged and stayed behind.

    \b
    Example:
      llmc cache push s3://models/llmc ./smollm2-cpu --key ~/keys/release.pem
      llmc cache push /mnt/shared/llmc --kind executable
      llmc cache push oci://registry.example.com/models/smollm2:cpu ./smollm2-cpu
    """
    from llmc.artifacts.local.opening import open_store
    from llmc.artifacts.oci.reference import is_reference
    from llmc.artifacts.remotes.base import JOBS
    from llmc.artifacts.remotes.urls import address
    from llmc.cli.output import TransferProgress
    from llmc.settings import Settings

    settings = Settings.from_environment()
    if key is not None:
        settings = replace(settings, signing_key=str(key))
    signer = None
    if settings.signing_key is not None:
        from llmc.artifacts.signing.signer import Signer

        signer = Signer.from_settings(settings)
    store = open_store(cache_dir, settings)
    if is_reference(url):
        entry = _one_image(store, what or [], kind, address(url).shown)
        from llmc.artifacts.oci import push_image

        with TransferProgress("push") as progress:
            report = push_image(store, entry, url, jobs=jobs or JOBS, signer=signer, progress=progress)
        _finish("pushed", "to", address(url).shown, report, as_json)
        return
    from llmc.artifacts.remotes import open_remote
    from llmc.artifacts.remotes.push import push as push_entries

    remote = open_remote(url)
    entries = _chosen(store, what, kind)
    with TransferProgress("push") as progress:
        report = push_entries(store, entries, remote, jobs=jobs or JOBS, signer=signer, progress=progress)
    _finish("pushed", "to", remote.url, report, as_json)


def pull(
    url: UrlArgument,
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY", help="Keys, or their first digits. Default: all that is there.", show_default=False
        ),
    ] = None,
    kind: KindFlag = None,
    output: Annotated[
        Path | None, option("--output -o", "FOLDER", "Make this folder the bundle that is pulled.", show_default=False)
    ] = None,
    allow_unsigned: Annotated[
        bool, typer.Option("--allow-unsigned", help="Take native code without a signature by a trusted key.")
    ] = False,
    jobs: JobsFlag = None,
    cache_dir: CacheDirFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Bring what a remote has into the store, verified; only what is missing here is moved.

    Native code has to be signed by a key that is trusted here (see `llmc cache trust`). A transfer that was cut off
    goes on when it is started again. Exit status 5 when the remote failed, or when something in it was damaged or
    not trusted and stayed behind.

    \b
    Example:
      llmc cache pull s3://models/llmc
      llmc cache pull s3://models/llmc 3fa9c2 -o ./smollm2-cpu
      llmc cache pull oci://registry.example.com/models/smollm2:cpu -o ./smollm2-cpu
    """
    from llmc.artifacts.bundle.stored import KIND
    from llmc.artifacts.local.opening import open_store
    from llmc.artifacts.oci.reference import is_reference
    from llmc.artifacts.remotes.base import JOBS
    from llmc.artifacts.remotes.urls import address
    from llmc.artifacts.signing.keyring import Keyring
    from llmc.cli.output import TransferProgress
    from llmc.settings import Settings

    settings = Settings.from_environment()
    trust: Keyring = Keyring.from_settings(settings, allow_unsigned)
    store = open_store(cache_dir, settings)
    if is_reference(url):
        if keys or kind is not None:
            raise InputError(f"{address(url).shown} is one bundle, or cache: give neither keys nor a kind with it")
        from llmc.artifacts.oci import pull_image

        with TransferProgress("pull") as progress:
            entry, report = pull_image(store, url, trust=trust, jobs=jobs or JOBS, progress=progress)
        _finish("pulled", "from", address(url).shown, report, as_json, _checkout(store, entry, output))
        return
    from llmc.artifacts.remotes import open_remote
    from llmc.artifacts.remotes.pull import find_names
    from llmc.artifacts.remotes.pull import pull as pull_entries

    remote = open_remote(url)
    if output is not None:
        if kind not in (None, KIND):
            raise InputError(f"-o is for a bundle, not for entries of kind {kind}; leave out one of them")
        kind, keys = KIND, [_hex(find_names(remote, keys, KIND), remote.url)]
    with TransferProgress("pull") as progress:
        report = pull_entries(store, remote, trust=trust, keys=keys, kind=kind, jobs=jobs or JOBS, progress=progress)
    folder = None
    if output is not None and keys and not report.refused:
        folder = _checkout(store, store.find(keys[0]), output)
    _finish("pulled", "from", remote.url, report, as_json, folder)


def export_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The archive, NAME.tar; - for stdout.")],
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY | BUNDLE]...",
            help="Keys, or their first digits; bundle folders. Default: every bundle and packed cache of the store.",
            show_default=False,
        ),
    ] = None,
    cache_dir: CacheDirFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Write bundles, or packed caches of other servers, into one file: a tarred OCI image layout.

    The same bundles give the same bytes, wherever and whenever it is made. podman and skopeo read it as
    `oci-archive:FILE`, and llmc wherever a bundle is asked for. The file appears whole, or not at all.

    \b
    Example:
      llmc cache export smollm2-cpu.tar ./smollm2-cpu
      llmc cache export - ./smollm2-cpu | zstd | ssh host 'zstd -dc | llmc cache import - -o smollm2-cpu'
    """
    from llmc.artifacts.oci.archive import export_images
    from llmc.cli.output import TransferProgress

    if as_json and file == STREAM:
        raise InputError("--json and the archive cannot both go to standard output; name a file")
    store = open_cache(cache_dir)
    entries = _every_image(store) if what is None else _chosen(store, what, None)
    with TransferProgress("export") as progress:
        done = export_images(store, entries, sys.stdout.buffer if file == STREAM else Path(file), progress=progress)
    if as_json:
        print_json({"file": file, **done._asdict()})
        return
    text = f"exported {count_text(done.images, 'image', 'images')} to {file}: {count_text(done.blobs, 'blob', 'blobs')}"
    echo(f"{text}, {size_text(done.bytes)} in {done.seconds:.1f} s", err=file == STREAM)


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
    """Bring the bundles and packed caches of an archive into the store, each verified to the last byte.

    Native code has to be signed by a key that is trusted here (see `llmc cache trust`); --require-signature or
    LLMC_REQUIRE_SIGNATURES ask for that of everything. A signature that is there has to be right. Exit status 5 when
    the archive is damaged or not trusted.

    \b
    Example:
      llmc cache import smollm2-cpu.tar
      llmc cache import smollm2-cpu.tar -o ./smollm2-cpu --require-signature
    """
    from llmc.artifacts.local.opening import open_store
    from llmc.artifacts.oci.archive import import_archive
    from llmc.artifacts.signing.keyring import Keyring
    from llmc.cli.output import TransferProgress
    from llmc.settings import Settings

    settings = Settings.from_environment()
    store = open_store(cache_dir, settings)
    if require_signature:
        settings = replace(settings, require_signatures=True)
    trust = Keyring.from_settings(settings, allow_unsigned)
    with TransferProgress("import") as progress:
        source = sys.stdin.buffer if file == STREAM else Path(file)
        entries, report = import_archive(store, source, trust=trust, progress=progress)
    if output is not None and len(entries) != 1:
        raise InputError(
            f"{file}: imported, but -o needs one bundle, and {len(entries)} images are in it; name one as store:KEY"
        )
    folder = None if output is None else _checkout(store, entries[0], output)
    _finish("imported", "from", file, report, as_json, folder)


def _every_image(store: Store) -> list[Entry]:
    """All that can be in an archive; incomplete ones are left out, with a message."""
    from llmc.artifacts.bundle.stored import KIND
    from llmc.artifacts.third_party.contents import KIND as FOREIGN

    found = [*store.entries(KIND), *store.entries(FOREIGN)]
    complete = [entry for entry in found if all(store.has(blob) for blob in entry.outputs.values())]
    if not complete:
        raise InputError(f"there is no bundle in {store.root}; name bundle folders, or another --cache-dir")
    if len(complete) != len(found):
        lost = count_text(len(found) - len(complete), "entry", "entries")
        echo(f"llmc: left out {lost} whose blobs are missing or damaged; see `llmc cache verify`", err=True)
    return complete


def _chosen(store: Store, what: Sequence[str] | None, kind: str | None) -> list[Entry]:
    """The entries that are meant; bundle folders are put into the store first."""
    if what is None:
        return store.entries(kind)
    found = [_add(store, item) if is_bundle(item) else store.find(item) for item in what]
    for entry in found:
        if entry.key.is_local:
            raise InputError(f"{entry.key.kind} {entry.key.short} means something on this machine only; leave it out")
    return [entry for entry in found if kind in (None, entry.key.kind)]


def _one_image(store: Store, what: Sequence[str], kind: str | None, url: str) -> Entry:
    """The bundle, or packed cache of another server, that is meant."""
    from llmc.artifacts.bundle.stored import KIND
    from llmc.artifacts.third_party.contents import KIND as FOREIGN

    if len(what) != 1 or kind not in (None, KIND, FOREIGN):
        raise InputError(f"{url} takes one bundle, or one packed cache: name its folder, or its key")
    (entry,) = _chosen(store, what, None)
    if entry.key.kind not in {KIND, FOREIGN}:
        raise InputError(f"{what[0]} is not a bundle but of kind {entry.key.kind}; `llmc cache ls --kind bundle`")
    return entry


def _add(store: Store, folder: str) -> Entry:
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.artifacts.bundle.stored import add_bundle

    with BundleFiles.open(bundle_folder(folder, store)) as files:
        return add_bundle(store, files)


def _hex(names: Sequence[str], url: str) -> str:
    """The digits of the one key that is named."""
    if len(names) != 1:
        found = f"there are {len(names)}" if names else "there is none"
        raise InputError(f"{url}: -o needs one bundle, and {found}; `llmc cache pull URL KEY -o FOLDER` names one")
    return Path(names[0]).stem


def _checkout(store: Store, entry: Entry, output: Path | None) -> Path | None:
    from llmc.artifacts.bundle.stored import checkout
    from llmc.artifacts.third_party.contents import KIND as FOREIGN

    if output is not None and entry.key.kind == FOREIGN:
        raise InputError(
            f"it is in the store, but -o is for bundles: `llmc cache unpack {entry.key.short}` puts a cache in place"
        )
    return None if output is None else checkout(store, entry, output)


def _finish(done: str, way: str, place: str, report: TransferReport, as_json: bool, folder: Path | None = None) -> None:
    """Print what was done. Raises ArtifactError when something stayed behind."""
    if as_json:
        found: dict[str, Any] = {"remote": place, **report._asdict()}
        found["refused"] = [item._asdict() for item in report.refused]
        if folder is not None:
            found["bundle"] = str(folder)
        print_json(found)
    else:
        speed = f" ({size_text(report.bytes / report.seconds)}/s)" if report.bytes and report.seconds else ""
        moved = f"{count_text(report.blobs, 'blob', 'blobs')}, {size_text(report.bytes)} moved"
        there = f"{count_text(report.skipped_blobs, 'blob', 'blobs')}, {size_text(report.skipped_bytes)} were there"
        entries = count_text(report.entries, "entry", "entries")
        echo(f"{done} {entries} {way} {place}: {moved} in {report.seconds:.1f} s{speed}; {there}")
        if folder is not None:
            echo(f"bundle: {folder}")
    if report.refused:
        shown = "; ".join(f"{item.name}: {item.reason}" for item in report.refused[:SHOWN])
        more = f"; and {len(report.refused) - SHOWN} more" if len(report.refused) > SHOWN else ""
        raise ArtifactError(f"{count_text(len(report.refused), 'entry', 'entries')} not {done}: {shown}{more}")


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("push")(push)
    app.command("pull")(pull)
    app.command("export")(export_command)
    app.command("import")(import_command)
