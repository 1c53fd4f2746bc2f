"""`llmc cache push|pull|export|import|pack|unpack`: share compiled results, and compile caches of other servers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.buckets.render.text import counted, size_text
from llmc.cli.cache.common import bundle_folder, is_bundle, open_cache, print_json
from llmc.cli.options import Command, argument, flag, store_flag, switch
from llmc.cli.output import TransferProgress, echo, print_table
from llmc.errors import ArtifactError, InputError
from llmc.paths import expanded
from llmc.settings import Settings, variables

if TYPE_CHECKING:
    from llmc.artifacts.remotes.base import TransferReport
    from llmc.artifacts.signing.keyring import Keyring
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.artifacts.third_party.base import FactComparison, ThirdPartyCache
    from llmc.artifacts.third_party.contents import Contents
    from llmc.artifacts.third_party.packing import Packed, Unpacked


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


FACTS_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class CachePackCommand(Command):
    """Pack another server's compile cache into the store, so that it can be signed, shared and unpacked on other hosts.

    The entry records the facts that decide whether the server accepts the cache: model, GPU and versions from its
    files, and the versions of the server's packages here. The files are never executed or unpickled. Other hosts treat
    them as native code and require a trusted signature.

    \b
    Example:
      llmc cache pack vllm ~/.cache/vllm --log server.log --fact model=Qwen/Qwen3-8B
      llmc cache pack vllm-neuron ~/.cache/vllm/neuron/compile_cache
      llmc cache pack gaudi /mnt/recipes --fact num_hpu_blocks=2100
      llmc cache pack jax /mnt/jax-cache --json
    """

    name: str = argument("CACHE", "The cache's format: vllm, triton, vllm-neuron, gaudi or jax.")
    folder: Path = argument("DIR", "The server's cache folder.")
    fact: list[str] | None = flag(None, "NAME=VALUE", "A fact that the cache itself does not record. Repeatable.")
    log: Path | None = flag(None, "FILE", "vLLM's start-up log: its version and settings become facts.")
    leave_out_incomplete: bool = switch("--leave-out-incomplete", "Skip half-written parts of the cache.")
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.artifacts.third_party.base import parse_facts
        from llmc.artifacts.third_party.packing import pack as pack_folder
        from llmc.integrations import compile_cache

        cache = compile_cache(self.name)
        facts = parse_facts(self.fact or (), "--fact")
        if self.log is not None:
            facts = {**_logged(cache, self.log), **facts}
        store = open_cache(self.cache_dir)
        with TransferProgress("pack") as progress:
            done = pack_folder(
                store,
                cache,
                expanded(self.folder),
                facts=facts,
                leave_out_incomplete=self.leave_out_incomplete,
                progress=progress,
            )
        _print_packed(cache, done, self.folder, self.as_json)


def _logged(cache: ThirdPartyCache, log: Path) -> dict[str, str]:
    from llmc.artifacts.third_party.base import merge

    try:
        with expanded(log).open(encoding="utf-8", errors="replace") as lines:
            return merge(cache.logged(lines))
    except OSError as error:
        raise InputError(f"cannot read the log {log}: {error.strerror or error}") from None
    except InputError as error:
        raise InputError(f"{log}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class CacheUnpackCommand(Command):
    """Unpack a packed compile cache to where its server looks, if it fits this server version, GPU and model.

    The cache's facts are compared with --expect and with this host: package versions, machine, GPU and folder. If any
    fact differs, all differences are printed and nothing is written (exit status 5). Each part of the cache appears
    atomically; equal parts that already exist are left alone.

    \b
    Example:
      llmc cache unpack 3fa9c2 --expect model=Qwen/Qwen3-8B
      llmc cache unpack oci://registry.example.com/caches/qwen3:h100 --keep
      llmc cache unpack qwen3.tar -o /cache/vllm --expect tensor_parallel_size=2 --strict
    """

    source: str = argument(
        "KEY | URL | FILE",
        "A key in the store or its first digits; oci://HOST/NAME:TAG or oci-layout:FOLDER:TAG; an archive.",
    )
    output: Path | None = flag(
        None, "DIR", "Target folder. Default: where the server looks, by its environment.", names="--output -o"
    )
    expect: list[str] | None = flag(None, "NAME=VALUE", "Required value of a fact. Repeatable.")
    allow: list[str] | None = flag(None, "NAME", "Accept a difference in this fact. Repeatable.")
    strict: bool = switch("--strict", "Refuse the cache if a required fact cannot be checked here.")
    keep: bool = switch("--keep", "Keep existing parts whose content differs.")
    replace: bool = switch("--replace", "Replace existing parts whose content differs.")
    dry_run: bool = switch("--dry-run", "Compare the facts but write nothing.")
    allow_unsigned: bool = switch("--allow-unsigned", "Accept a cache without a trusted signature.")
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.artifacts.third_party.base import parse_facts
        from llmc.artifacts.third_party.contents import read_contents
        from llmc.artifacts.third_party.packing import compare_with_host
        from llmc.integrations import compile_cache

        if self.keep and self.replace:
            raise InputError("--keep and --replace contradict each other: give one of them")
        given = parse_facts(self.expect or (), "--expect")
        store = open_cache(self.cache_dir)
        entry = _entry(store, self.source, self.allow_unsigned)
        contents = read_contents(entry, f"{entry.key.kind} {entry.key.short}")
        cache = compile_cache(contents.cache)
        environment = variables(cache.variables)
        folder = _folder(cache, self.output, environment)
        comparison = compare_with_host(cache, contents, folder, given, environment)
        _require_match(comparison, contents, self.allow or (), self.strict)
        done = None
        if not self.dry_run:
            done = _location(store, cache, contents, folder, self.keep, self.replace)
        _print_unpacked(entry, contents, folder, comparison, done, self.as_json)


def _entry(store: Store, source: str, allow_unsigned: bool) -> Entry:
    """A source outside the store is pulled or imported first."""
    from llmc.artifacts.oci.archive import import_archive, is_archive_name
    from llmc.artifacts.oci.reference import is_reference
    from llmc.artifacts.signing.keyring import Keyring
    from llmc.artifacts.third_party.contents import KIND

    settings = Settings.from_environment()
    trust = Keyring.from_settings(settings, allow_unsigned)
    if is_reference(source):
        from llmc.artifacts.oci import pull_image

        with TransferProgress("pull") as progress:
            return pull_image(store, source, trust=trust, progress=progress)[0]
    if not is_archive_name(source):
        return store.find(source)
    with TransferProgress("import") as progress:
        entries, _ = import_archive(store, expanded(source), trust=trust, progress=progress)
    found = [entry for entry in entries if entry.key.kind == KIND]
    if len(found) != 1:
        raise InputError(
            f"{source}: the archive holds {len(found)} packed caches; import it, then unpack one by its KEY"
        )
    return found[0]


def _folder(cache: ThirdPartyCache, output: Path | None, environment: Mapping[str, str]) -> Path:
    if output is not None:
        return expanded(output)
    location = cache.location(environment)
    if location is None:
        raise InputError(
            f"the cache folder of {cache.name} is unknown here: name it with -o, or set "
            f"{' or '.join(cache.variables)} as for the server"
        )
    return expanded(location)


def _require_match(comparison: FactComparison, contents: Contents, allow: Sequence[str], strict: bool) -> None:
    from llmc.artifacts.third_party.base import resolve

    allowed = {resolve(name, contents.facts) for name in allow}
    wrong = [str(item) for item in comparison.mismatches if item.name not in allowed]
    if wrong:
        raise ArtifactError(
            f"not unpacked: {'; '.join(wrong)}; use a cache that was built for this host, or add --allow NAME if the "
            "server accepts the difference"
        )
    if strict and (unknown := set(comparison.unchecked) - allowed):
        raise ArtifactError(
            f"not unpacked: the expected value of {', '.join(sorted(unknown))} is unknown here; give it with --expect "
            "NAME=VALUE, or leave out --strict"
        )


def _location(
    store: Store, cache: ThirdPartyCache, contents: Contents, folder: Path, keep: bool, replace: bool
) -> Unpacked:  # fmt: skip
    from llmc.artifacts.third_party.packing import unpack as unpack_entry

    with TransferProgress("unpack") as progress:
        return unpack_entry(
            store, cache, contents, folder, differing="keep" if keep else "replace" if replace else "refuse",
            progress=progress,
        )  # fmt: skip


def _print_packed(cache: ThirdPartyCache, done: Packed, folder: Path, as_json: bool) -> None:
    contents = done.contents
    if as_json:
        print_json({
            "cache": cache.name, "kind": done.entry.key.kind, "key": done.entry.key.digest, "new": done.new,
            "files": len(contents.files), "bytes": contents.size, "facts": dict(contents.facts),
            "left_out": dict(done.left_out),
        })  # fmt: skip
        return
    files = counted(len(contents.files), "file")
    new = "" if done.new else ", already in the store"
    echo(f"packed {cache.name} cache {folder}: {files}, {size_text(contents.size)}{new}")
    for unit, why in done.left_out.items():
        echo(f"left out: {unit} {why}")
    _print_facts(cache, contents)
    echo(f"key: {done.entry.key.digest}")


def _print_facts(cache: ThirdPartyCache, contents: Contents) -> None:
    from fnmatch import fnmatchcase

    decisive = [name for name in contents.facts if any(fnmatchcase(name, item) for item in cache.must_match)]
    others = sorted(contents.facts.keys() - set(decisive), key=lambda name: ("hash" in name or "[" in name, name))
    shown = [*decisive, *others][:FACTS_SHOWN]
    if shown:
        print_table(("FACT", "VALUE"), [(name, contents.facts[name]) for name in shown])
    if len(contents.facts) > len(shown):
        echo(f"and {len(contents.facts) - len(shown)} more facts; `llmc cache show KEY` lists all")


def _print_unpacked(
    entry: Entry, contents: Contents, folder: Path, comparison: FactComparison, done: Unpacked | None, as_json: bool
) -> None:
    if as_json:
        found: dict[str, Any] = {
            "cache": contents.cache, "key": entry.key.digest, "folder": str(folder), "written": done is not None,
            "matching": list(comparison.matching), "unchecked": list(comparison.unchecked),
            "mismatches": [item._asdict() for item in comparison.mismatches],
        }  # fmt: skip
        print_json(found | ({} if done is None else done._asdict()))
        return
    matching = ", ".join(comparison.matching) or "none"
    echo(f"facts that match: {matching}")
    for item in comparison.mismatches:
        echo(f"allowed: {item}")
    if comparison.unchecked:
        echo(f"not checked, because their expected values are unknown here: {', '.join(comparison.unchecked)}")
    if done is None:
        echo(f"{contents.cache} cache for {folder}: nothing written (--dry-run)")
        return
    size = size_text(contents.size)
    counts = [(done.placed, "new"), (done.replaced, "replaced"), (done.present, "there already"), (done.kept, "kept")]
    reported = ", ".join(f"{counted(len(units), 'part')} {what}" for units, what in counts if units)
    echo(f"unpacked {contents.cache} cache to {folder}: {size}; {reported}")
