"""`llmc cache pack|unpack`: other servers' compile caches in llmc's store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.buckets.render.text import size_text
from llmc.cli.cache.common import count_text, open_cache, print_json
from llmc.cli.options import Command, argument, flag, store_flag, switch
from llmc.cli.output import TransferProgress, echo, print_table
from llmc.errors import ArtifactError, InputError
from llmc.paths import expanded
from llmc.settings import Settings, variables

if TYPE_CHECKING:
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.artifacts.third_party.base import ThirdPartyCache
    from llmc.artifacts.third_party.contents import Contents
    from llmc.artifacts.third_party.facts import FactComparison
    from llmc.artifacts.third_party.packing import Packed
    from llmc.artifacts.third_party.unpacking import Unpacked

FACTS_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class CachePackCommand(Command):
    """Put another server's compile cache into the store, to be signed, pushed, exported and unpacked elsewhere.

    The entry records what decides whether that server takes the cache: what its files say of the model, the card and
    the versions, and which versions of the server's packages are installed here. Its files are never executed or
    unpickled. They count as native code: elsewhere, they have to be signed by a key that is trusted there.

    \b
    Example:
      llmc cache pack vllm ~/.cache/vllm --fact model=Qwen/Qwen3-8B
      llmc cache pack vllm-neuron ~/.cache/vllm/neuron/compile_cache
      llmc cache pack gaudi /mnt/recipes --fact num_hpu_blocks=2100
      llmc cache pack jax /mnt/jax-cache --json
    """

    name: str = argument("CACHE", "Whose: vllm, triton, vllm-neuron, gaudi or jax.")
    folder: Path = argument("DIR", "The folder where that server keeps its cache.")
    fact: list[str] | None = flag(None, "NAME=VALUE", "A key fact that the cache does not say itself; may be repeated.")
    leave_out_incomplete: bool = switch("--leave-out-incomplete", "Pack the rest of a cache that is half written.")
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.artifacts.third_party.facts import parse_facts
        from llmc.artifacts.third_party.packing import pack as pack_folder
        from llmc.integrations import compile_cache

        cache = compile_cache(self.name)
        facts = parse_facts(self.fact or (), "--fact")
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


@dataclass(frozen=True, kw_only=True)
class CacheUnpackCommand(Command):
    """Put a packed compile cache where its server looks, if it is of this server's version, card and model.

    The facts of the cache are compared with what --expect says and with what is found here: versions of installed
    packages, the machine, the card, the folder. Every one that differs is named, and nothing is written then (exit
    status 5). Each part of the cache appears in one step; what is there already and equal is left alone.

    \b
    Example:
      llmc cache unpack 3fa9c2 --expect model=Qwen/Qwen3-8B
      llmc cache unpack oci://registry.example.com/caches/qwen3:h100 --keep
      llmc cache unpack qwen3.tar -o /cache/vllm --expect tensor_parallel_size=2 --strict
    """

    source: str = argument(
        "KEY | URL | FILE",
        "A key of the store, or its first digits; oci://HOST/NAME:TAG or oci-layout:FOLDER:TAG; an archive.",
    )
    output: Path | None = flag(
        None, "DIR", "Where to. Default: where the server looks, by its environment.", names="--output -o"
    )
    expect: list[str] | None = flag(None, "NAME=VALUE", "What a fact of the cache has to be; may be repeated.")
    allow: list[str] | None = flag(None, "NAME", "Take the cache though this fact differs; may be repeated.")
    strict: bool = switch("--strict", "Refuse a cache of which a fact that has to match cannot be checked here.")
    keep: bool = switch("--keep", "Leave parts as they are that are there with other content.")
    replace: bool = switch("--replace", "Replace parts that are there with other content.")
    dry_run: bool = switch("--dry-run", "Compare the facts, and write nothing.")
    allow_unsigned: bool = switch("--allow-unsigned", "Take a cache without a signature by a trusted key.")
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.artifacts.third_party.contents import read_contents
        from llmc.artifacts.third_party.facts import parse_facts
        from llmc.artifacts.third_party.unpacking import compare_with_host
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
    """The entry of a packed cache, which is pulled or imported first where it is not in the store."""
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
        raise InputError(f"{source}: {len(found)} packed caches are in it; import it, and unpack one by its KEY")
    return found[0]


def _folder(cache: ThirdPartyCache, output: Path | None, environment: Mapping[str, str]) -> Path:
    if output is not None:
        return expanded(output)
    location = cache.location(environment)
    if location is None:
        raise InputError(
            f"where {cache.name} looks is not known here: name the folder with -o, or set "
            f"{' or '.join(cache.variables)} as for the server"
        )
    return expanded(location)


def _require_match(comparison: FactComparison, contents: Contents, allow: Sequence[str], strict: bool) -> None:
    from llmc.artifacts.third_party.facts import resolve

    allowed = {resolve(name, contents.facts) for name in allow}
    wrong = [str(item) for item in comparison.mismatches if item.name not in allowed]
    if wrong:
        raise ArtifactError(
            f"not unpacked: {'; '.join(wrong)}; take a cache that was made for this, or --allow NAME where the server "
            "does not mind"
        )
    if strict and (unknown := set(comparison.unchecked) - allowed):
        raise ArtifactError(
            f"not unpacked: nothing here says what {', '.join(sorted(unknown))} should be; say it with --expect "
            "NAME=VALUE, or leave out --strict"
        )


def _location(
    store: Store, cache: ThirdPartyCache, contents: Contents, folder: Path, keep: bool, replace: bool
) -> Unpacked:  # fmt: skip
    from llmc.artifacts.third_party.unpacking import unpack as unpack_entry

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
    files = count_text(len(contents.files), "file", "files")
    new = "" if done.new else ", which the store had already"
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
        echo(f"not checked, as nothing here says them: {', '.join(comparison.unchecked)}")
    if done is None:
        echo(f"{contents.cache} cache for {folder}: nothing written (--dry-run)")
        return
    size = size_text(contents.size)
    counts = [(done.placed, "new"), (done.replaced, "replaced"), (done.present, "there already"), (done.kept, "kept")]
    reported = ", ".join(f"{count_text(len(units), 'part', 'parts')} {what}" for units, what in counts if units)
    echo(f"unpacked {contents.cache} cache to {folder}: {size}; {reported}")
