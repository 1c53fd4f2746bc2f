"""`llmc cache pack|unpack`: compile caches of other servers in llmc's store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.buckets.render.text import counted, size_text
from llmc.cli.cache.common import open_cache, print_json
from llmc.cli.options import Command, argument, flag, store_flag, switch
from llmc.cli.output import TransferProgress, echo, print_table
from llmc.errors import ArtifactError, InputError
from llmc.paths import expanded
from llmc.settings import Settings, variables

if TYPE_CHECKING:
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.artifacts.third_party.base import FactComparison, ThirdPartyCache
    from llmc.artifacts.third_party.contents import Contents
    from llmc.artifacts.third_party.packing import Packed, Unpacked

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
    """The entry of a packed cache. A source outside the store is pulled or imported first."""
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
