"""`llmc cache push|pull|export|import`: share compiled results through a folder, object store, registry or file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.buckets.render.text import counted, size_text
from llmc.cli.cache.common import (
    bundle_folder,
    is_bundle,
    open_cache,
    print_json,
)
from llmc.cli.options import Command, argument, flag, store_flag, switch
from llmc.cli.output import TransferProgress, echo
from llmc.errors import ArtifactError, InputError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.remotes.base import TransferReport
    from llmc.artifacts.signing.keyring import Keyring
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store

SHOWN = 5
STREAM = "-"

_url = partial(
    argument, "URL",
    "A folder; s3://BUCKET/FOLDER, gs://, hf:// or another fsspec URL; or, for one bundle or packed cache, "
    "oci://HOST/NAME:TAG or oci-layout:FOLDER:TAG.",
)  # fmt: skip
_kind = partial(flag, None, "KIND", "Only entries of this kind.")
_jobs = partial(flag, None, "N", "Parallel transfers. Default: 8.", min=1)


@dataclass(frozen=True, kw_only=True)
class CachePushCommand(Command):
    """Upload stored results or bundles to a remote; only what the remote lacks is transferred.

    Run it again to resume an interrupted transfer. Exit status 5: the remote failed, or something damaged in the store
    was not pushed.

    \b
    Example:
      llmc cache push s3://models/llmc ./smollm2-cpu --key ~/keys/release.pem
      llmc cache push /mnt/shared/llmc --kind executable
      llmc cache push oci://registry.example.com/models/smollm2:cpu ./smollm2-cpu
    """

    url: str = _url()
    what: list[str] | None = argument(
        "KEY | BUNDLE", "Keys or their first digits; bundle folders. Default: the whole store.", default=None
    )
    kind: str | None = _kind()
    key: Path | None = flag(None, "FILE", "Sign with this private key. Default: LLMC_SIGNING_KEY.")
    jobs: int | None = _jobs()
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.artifacts.local.opening import open_store
        from llmc.artifacts.oci.reference import is_reference
        from llmc.artifacts.remotes.base import JOBS, address

        settings = Settings.from_environment()
        if self.key is not None:
            settings = replace(settings, signing_key=str(self.key))
        signer = None
        if settings.signing_key is not None:
            from llmc.artifacts.signing.signer import Signer

            signer = Signer.from_settings(settings)
        store = open_store(self.cache_dir, settings)
        if is_reference(self.url):
            entry = _one_image(store, self.what or [], self.kind, address(self.url).shown)
            from llmc.artifacts.oci import push_image

            with TransferProgress("push") as progress:
                report = push_image(store, entry, self.url, jobs=self.jobs or JOBS, signer=signer, progress=progress)
            _finish("pushed", "to", address(self.url).shown, report, self.as_json)
            return
        from llmc.artifacts.remotes import open_remote
        from llmc.artifacts.remotes.transfer import push as push_entries

        remote = open_remote(self.url)
        entries = _chosen(store, self.what, self.kind)
        with TransferProgress("push") as progress:
            report = push_entries(store, entries, remote, jobs=self.jobs or JOBS, signer=signer, progress=progress)
        _finish("pushed", "to", remote.url, report, self.as_json)


@dataclass(frozen=True, kw_only=True)
class CachePullCommand(Command):
    """Download results or bundles from a remote into the store and verify them; only what is missing is transferred.

    Native code must be signed by a key that is trusted here (llmc cache trust). Run it again to resume an interrupted
    transfer. Exit status 5: the remote failed, or something damaged or untrusted was not pulled.

    \b
    Example:
      llmc cache pull s3://models/llmc
      llmc cache pull s3://models/llmc 3fa9c2 -o ./smollm2-cpu
      llmc cache pull oci://registry.example.com/models/smollm2:cpu -o ./smollm2-cpu
    """

    url: str = _url()
    keys: list[str] | None = argument("KEY", "Keys or their first digits. Default: everything there.", default=None)
    kind: str | None = _kind()
    output: Path | None = flag(None, "FOLDER", "Also write the pulled bundle to this folder.", names="--output -o")
    allow_unsigned: bool = switch("--allow-unsigned", "Accept native code without a trusted signature.")
    jobs: int | None = _jobs()
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.artifacts.bundle.stored import KIND
        from llmc.artifacts.local.opening import open_store
        from llmc.artifacts.oci.reference import is_reference
        from llmc.artifacts.remotes.base import JOBS, address
        from llmc.artifacts.signing.keyring import Keyring

        settings = Settings.from_environment()
        trust: Keyring = Keyring.from_settings(settings, self.allow_unsigned)
        store = open_store(self.cache_dir, settings)
        if is_reference(self.url):
            if self.keys or self.kind is not None:
                raise InputError(f"{address(self.url).shown} is a single bundle or cache: leave out keys and --kind")
            from llmc.artifacts.oci import pull_image

            with TransferProgress("pull") as progress:
                entry, report = pull_image(store, self.url, trust=trust, jobs=self.jobs or JOBS, progress=progress)
            _finish(
                "pulled", "from", address(self.url).shown, report, self.as_json, _checkout(store, entry, self.output)
            )
            return
        from llmc.artifacts.remotes import open_remote
        from llmc.artifacts.remotes.transfer import find_names
        from llmc.artifacts.remotes.transfer import pull as pull_entries

        remote = open_remote(self.url)
        kind, keys = self.kind, self.keys
        if self.output is not None:
            if kind not in (None, KIND):
                raise InputError(f"-o is for bundles, not for entries of kind {kind}; leave out -o or --kind")
            kind, keys = KIND, [_hex(find_names(remote, keys, KIND), remote.url)]
        with TransferProgress("pull") as progress:
            report = pull_entries(
                store, remote, trust=trust, keys=keys, kind=kind, jobs=self.jobs or JOBS, progress=progress
            )
        folder = None
        if self.output is not None and keys and not report.refused:
            folder = _checkout(store, store.find(keys[0]), self.output)
        _finish("pulled", "from", remote.url, report, self.as_json, folder)


@dataclass(frozen=True, kw_only=True)
class CacheExportCommand(Command):
    """Write bundles or packed caches to one archive file: a tarred OCI image layout.

    The same bundles always give the same bytes. podman and skopeo read the file as oci-archive:FILE; llmc accepts it
    wherever it takes a bundle. The file is written atomically.

    \b
    Example:
      llmc cache export smollm2-cpu.tar ./smollm2-cpu
      llmc cache export - ./smollm2-cpu | zstd | ssh host 'zstd -dc | llmc cache import - -o smollm2-cpu'
    """

    file: str = argument("FILE", "The archive, NAME.tar, or - for stdout.")
    what: list[str] | None = argument(
        "[KEY | BUNDLE]...",
        "Keys or their first digits; bundle folders. Default: every bundle and packed cache in the store.",
        default=None,
    )
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.artifacts.oci.archive import export_images

        if self.as_json and self.file == STREAM:
            raise InputError("--json and the archive cannot both go to standard output; name a file")
        store = open_cache(self.cache_dir)
        entries = _every_image(store) if self.what is None else _chosen(store, self.what, None)
        with TransferProgress("export") as progress:
            done = export_images(
                store, entries, sys.stdout.buffer if self.file == STREAM else Path(self.file), progress=progress
            )
        if self.as_json:
            print_json({"file": self.file, **done._asdict()})
            return
        images, blobs = counted(done.images, "image"), counted(done.blobs, "blob")
        text = f"exported {images} to {self.file}: {blobs}, {size_text(done.bytes)} in {done.seconds:.1f} s"
        echo(text, err=self.file == STREAM)


@dataclass(frozen=True, kw_only=True)
class CacheImportCommand(Command):
    """Import the bundles and packed caches of an archive into the store; every byte is verified.

    Native code must be signed by a key that is trusted here (llmc cache trust). --require-signature or
    LLMC_REQUIRE_SIGNATURES require that for everything. An existing signature must always be valid. Exit status 5: the
    archive is damaged or not trusted.

    \b
    Example:
      llmc cache import smollm2-cpu.tar
      llmc cache import smollm2-cpu.tar -o ./smollm2-cpu --require-signature
    """

    file: str = argument("FILE", "An archive of llmc cache export, or - for stdin.")
    output: Path | None = flag(None, "FOLDER", "Also write the archive's bundle to this folder.", names="--output -o")
    require_signature: bool = switch("--require-signature", "Refuse anything without a trusted signature.")
    allow_unsigned: bool = switch("--allow-unsigned", "Accept native code without a trusted signature.")
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.artifacts.local.opening import open_store
        from llmc.artifacts.oci.archive import import_archive
        from llmc.artifacts.signing.keyring import Keyring

        settings = Settings.from_environment()
        store = open_store(self.cache_dir, settings)
        if self.require_signature:
            settings = replace(settings, require_signatures=True)
        trust = Keyring.from_settings(settings, self.allow_unsigned)
        with TransferProgress("import") as progress:
            source = sys.stdin.buffer if self.file == STREAM else Path(self.file)
            entries, report = import_archive(store, source, trust=trust, progress=progress)
        if self.output is not None and len(entries) != 1:
            raise InputError(
                f"{self.file}: imported, but -o needs one bundle and the archive holds {len(entries)} images; "
                "use one as store:KEY"
            )
        folder = None if self.output is None else _checkout(store, entries[0], self.output)
        _finish("imported", "from", self.file, report, self.as_json, folder)


def _every_image(store: Store) -> list[Entry]:
    """Every entry that fits in an archive. Incomplete ones are skipped with a message."""
    from llmc.artifacts.bundle.stored import KIND
    from llmc.artifacts.third_party.contents import KIND as FOREIGN

    found = [*store.entries(KIND), *store.entries(FOREIGN)]
    complete = [entry for entry in found if all(store.has(blob) for blob in entry.outputs.values())]
    if not complete:
        raise InputError(f"no bundle in {store.root}; name bundle folders, or another --cache-dir")
    if len(complete) != len(found):
        lost = counted(len(found) - len(complete), "entry", "entries")
        echo(f"llmc: left out {lost} whose blobs are missing or damaged; see `llmc cache verify`", err=True)
    return complete


def _chosen(store: Store, what: Sequence[str] | None, kind: str | None) -> list[Entry]:
    """The chosen entries. Bundle folders are added to the store first."""
    if what is None:
        return store.entries(kind)
    found = [_add(store, item) if is_bundle(item) else store.find(item) for item in what]
    for entry in found:
        if entry.key.is_local:
            raise InputError(f"{entry.key.kind} {entry.key.short} is only valid on this machine; leave it out")
    return [entry for entry in found if kind in (None, entry.key.kind)]


def _one_image(store: Store, what: Sequence[str], kind: str | None, url: str) -> Entry:
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
    if len(names) != 1:
        found = f"there are {len(names)}" if names else "there is none"
        raise InputError(f"{url}: -o needs one bundle, but {found}; choose one: `llmc cache pull URL KEY -o FOLDER`")
    return Path(names[0]).stem


def _checkout(store: Store, entry: Entry, output: Path | None) -> Path | None:
    from llmc.artifacts.bundle.stored import checkout
    from llmc.artifacts.third_party.contents import KIND as FOREIGN

    if output is not None and entry.key.kind == FOREIGN:
        raise InputError(
            f"it is in the store, but -o is for bundles: unpack it with `llmc cache unpack {entry.key.short}`"
        )
    return None if output is None else checkout(store, entry, output)


def _finish(
    done: str, way: str, location: str, report: TransferReport, as_json: bool, folder: Path | None = None
) -> None:
    """Print the result. Raises ArtifactError if something was refused."""
    if as_json:
        found: dict[str, Any] = {"remote": location, **report._asdict()}
        found["refused"] = [item._asdict() for item in report.refused]
        if folder is not None:
            found["bundle"] = str(folder)
        print_json(found)
    else:
        speed = f" ({size_text(report.bytes / report.seconds)}/s)" if report.bytes and report.seconds else ""
        moved = f"{counted(report.blobs, 'blob')}, {size_text(report.bytes)} moved"
        there = f"{counted(report.skipped_blobs, 'blob')}, {size_text(report.skipped_bytes)} were there"
        entries = counted(report.entries, "entry", "entries")
        echo(f"{done} {entries} {way} {location}: {moved} in {report.seconds:.1f} s{speed}; {there}")
        if folder is not None:
            echo(f"bundle: {folder}")
    if report.refused:
        shown = "; ".join(f"{item.name}: {item.reason}" for item in report.refused[:SHOWN])
        more = f"; and {len(report.refused) - SHOWN} more" if len(report.refused) > SHOWN else ""
        raise ArtifactError(f"{counted(len(report.refused), 'entry', 'entries')} not {done}: {shown}{more}")
