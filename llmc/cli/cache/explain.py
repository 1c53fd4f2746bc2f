"""`llmc cache explain`: print which components make two keys, bundles or packed caches differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llmc.cli.cache.common import bundle_folder, is_bundle, open_cache, print_json, show_value
from llmc.cli.options import Command, argument, store_flag, switch
from llmc.cli.output import echo
from llmc.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from llmc.artifacts.key import Difference, Value
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store

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
    """Read a bundle folder or a store entry. Raises ArtifactError for anything else."""
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
    """File digests of a packed cache by path; empty for any other entry."""
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
    """The differing components; those of single executables and of a cache's files come last."""
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
    """Paths at which two packed caches differ; empty for anything else."""
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
