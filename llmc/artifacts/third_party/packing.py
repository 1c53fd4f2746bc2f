"""Packing: a cache in a folder becomes an entry of the store, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.store.entries import MAX_BYTES, Entry, encode_entry
from llmc.artifacts.store.store import Store
from llmc.artifacts.third_party.base import ThirdPartyCache
from llmc.artifacts.third_party.contents import Contents, PackedFile
from llmc.artifacts.third_party.facts import merge, versions
from llmc.artifacts.third_party.tree import Tree, require_unchanged, scan_tree
from llmc.errors import ArtifactError, InputError

JOBS = 8
SHOWN = 3
ROOM = 64 << 10
"""Bytes reserved for an entry's signatures."""

Progress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes."""


class Packed(NamedTuple):
    """A packed cache: its entry and contents, whether the entry is new, and the units left out, with the reason."""

    entry: Entry
    contents: Contents
    new: bool
    left_out: Mapping[str, str]


def pack(
    store: Store,
    cache: ThirdPartyCache,
    folder: Path,
    *,
    facts: Mapping[str, str] | None = None,
    leave_out_incomplete: bool = False,
    progress: Progress | None = None,
) -> Packed:
    """Pack the cache in `folder` into the store; the same files and facts give the same entry everywhere.

    `facts` are added to those in the tree, and to the versions of the server's packages that are installed here; an
    empty value removes an automatically recorded one. Raises InputError if there is no such cache or a given fact
    contradicts the tree, ArtifactError for a cache that is half written, changes meanwhile, or contains anything but
    files, CapacityError or UnwritableError if the store cannot take it.
    """
    root = Path(os.path.realpath(cache.root(folder)))
    whole = scan_tree(root, cache.leaves_out)
    left_out = cache.incomplete(whole)
    if left_out and not leave_out_incomplete:
        raise ArtifactError(f"{root}: {_reported(left_out)}; wait for the server, or add --leave-out-incomplete")
    tree = whole.without(left_out, cache.unit)
    entries = sorted(cache.entries(tree))
    if not entries:
        why = f" ({_reported(left_out)})" if left_out else ""
        raise InputError(f"{root}: no cache of {cache.name} in it{why}: {cache.looks_like}")
    known = _facts(cache, tree, folder, facts or {})
    form = cache.image(tree, known, entries)
    files = _store_files(store, tree, progress)
    require_unchanged(whole, cache.leaves_out)
    extra = {path: store.put_bytes(content) for path, content in form.files.items()}
    contents = Contents(cache.name, known, files, tree.folders, form.folder, form.labels, extra)
    entry, new = _publish(store, contents)
    return Packed(entry, contents, new, left_out)


def _facts(cache: ThirdPartyCache, tree: Tree, folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    carried = merge(cache.facts(tree))
    for name in given.keys() & carried.keys():
        if given[name] != carried[name]:
            raise InputError(f"the cache says that {name} is {carried[name]}, but --fact says {given[name]}; omit that")
    found = {**merge(versions(cache.packages)), **cache.recorded(folder), **carried, **given}
    return {name: found[name] for name in sorted(found) if found[name]}


def _store_files(store: Store, tree: Tree, progress: Progress | None) -> dict[str, PackedFile]:
    total = sum(file.size for file in tree.files.values())
    done = 0
    found: dict[str, PackedFile] = {}
    with ThreadPoolExecutor(JOBS, thread_name_prefix="llmc-pack") as pool:
        try:
            stored = pool.map(store.put_file, (tree.root / path for path in tree.files))
            for (path, file), blob in zip(tree.files.items(), stored, strict=True):
                found[path] = PackedFile(blob, file.executable)
                done += blob.size
                if progress is not None:
                    progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


def _publish(store: Store, contents: Contents) -> tuple[Entry, bool]:
    key, outputs, meta = contents.key(), contents.outputs(), contents.meta()
    if (there := store.lookup(key)) is not None:  # it may be signed
        return there, False
    if (size := len(encode_entry(Entry(key, outputs, meta, 0.0, 0.0)))) > MAX_BYTES - ROOM:
        raise InputError(
            f"the names of {len(contents.files)} files take {size} bytes, more than an entry has room for; pack parts "
            "of the cache one by one"
        )
    return store.publish(key, outputs, meta, created=0.0), True  # so that its image, archive and signature never change


def _reported(units: Mapping[str, str]) -> str:
    reported = [f"{unit!r:.200} {why}" for unit, why in sorted(units.items())[:SHOWN]]
    more = [f"and {len(units) - SHOWN} more"] if len(units) > SHOWN else []
    return ", ".join([*reported, *more])
