"""Packing a cache in a folder into an entry of the store, and installing it where its server looks.

A unit is a part of the cache (`ThirdPartyCache.unit`), and is installed in one step. If the folder does not exist, all
of it appears in one step. A killed process leaves whole units; unpacking again adds the rest and sweeps what a dead
writer left. Files are copied out of the store, since servers write to their caches.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from llmc.artifacts.atomic_write import create_exclusive, discard, make_folder, sync_folder, write_all, writing
from llmc.artifacts.digest import BUFFER, Blob, digest_file, open_regular
from llmc.artifacts.folder_swap import FolderSwap
from llmc.artifacts.store.entries import MAX_BYTES, Entry, encode_entry
from llmc.artifacts.store.layout import scan
from llmc.artifacts.store.store import Store
from llmc.artifacts.third_party.base import FactComparison, ThirdPartyCache, compare, merge, versions
from llmc.artifacts.third_party.contents import Contents, PackedFile, Tree, require_unchanged, scan_tree
from llmc.errors import ArtifactError, CapacityError, InputError

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


LEFTOVERS = (".new", ".old")
TEMPORARY = "llmc"
"""Part of the name of the folder for new single files, inside the cache's own: `.llmc.<random>.new`."""

Differing = Literal["refuse", "keep", "replace"]
"""What to do with an existing unit that has other content."""


class Unpacked(NamedTuple):
    """The units that were installed, existed already, were kept in spite of other content, or were replaced."""

    placed: tuple[str, ...]
    present: tuple[str, ...]
    kept: tuple[str, ...]
    replaced: tuple[str, ...]


class _Unit(NamedTuple):
    """A unit: its files by path, and its empty folders. `whole`: all are below a folder of its name."""

    name: str
    files: Mapping[str, PackedFile]
    folders: tuple[str, ...]
    whole: bool


class _PresentError(Exception):
    """Another process installed the same content meanwhile."""


class _OccupiedError(Exception):
    """Another process created the folder meanwhile."""


def compare_with_host(
    cache: ThirdPartyCache, contents: Contents, folder: Path, given: Mapping[str, str], environment: Mapping[str, str]
) -> FactComparison:
    """Compare the facts of a packed cache with those `given`, and with those known of this host.

    Raises InputError as `facts.compare` does.
    """
    found = {**merge(versions(cache.packages)), **cache.here(environment, folder)}
    return compare(contents.facts, cache.must_match, given, found)


def unpack(
    source: BlobSource,
    cache: ThirdPartyCache,
    contents: Contents,
    folder: Path,
    *,
    differing: Differing = "refuse",
    progress: Progress | None = None,
) -> Unpacked:
    """Unpack a cache into `folder`, which need not exist; other caches in it stay.

    Equal units are left alone. A unit that exists with other content is refused before anything is written, unless
    `differing` says otherwise. Raises ArtifactError for that, BlobMissingError if the source lacks a part of the cache,
    CapacityError or UnwritableError if the folder cannot be written.
    """
    folder = Path(os.path.realpath(folder))
    units = _units(cache, contents)
    files = _Files(source, contents, progress)
    with writing(folder, contents.size, REMEDY):
        if not folder.exists():
            with suppress(_OccupiedError):
                _install_all(files, contents, folder)
                return Unpacked(tuple(unit.name for unit in units), (), (), ())
        return _install_units(files, units, folder, differing)


def _install_all(files: _Files, contents: Contents, folder: Path) -> None:
    def occupied(_: Path) -> None:
        raise _OccupiedError

    make_folder(folder.parent)
    files.expect(folder.parent, contents.files.values())
    swap = FolderSwap(occupied, _remove, REMEDY)
    swap.sweep(folder)
    with swap.sibling(folder) as new:
        files.fill(new, contents.files, contents.folders)
        swap.install(new, folder)


def _install_units(files: _Files, units: Iterable[_Unit], folder: Path, differing: Differing) -> Unpacked:
    found: dict[str, list[_Unit]] = {"absent": [], "same": [], "differs": []}
    for unit in units:
        found[_state(files, folder, unit)].append(unit)
    others = found["differs"]
    if others and differing == "refuse":
        raise _refusal(folder, others)
    wanted = [*found["absent"], *(others if differing == "replace" else ())]
    files.expect(folder, [file for unit in wanted for file in unit.files.values()])
    replace = differing == "replace"
    _sweep(folder, wanted)
    placed = {unit.name for unit in wanted if unit.whole and _install_folder(files, unit, folder, replace=replace)}
    placed |= _install_files(files, [unit for unit in wanted if not unit.whole], folder, replace=replace)
    present = {unit.name for unit in found["same"]} | {unit.name for unit in wanted} - placed
    names = {unit.name for unit in others}
    kept = names if differing == "keep" else set()
    return Unpacked(*(tuple(sorted(some)) for some in (placed - names, present, kept, placed & names)))


def _sweep(folder: Path, units: Iterable[_Unit]) -> None:
    """Remove what dead writers left next to the units; each parent folder is scanned once."""
    leftovers = {
        parent: any(item.name.endswith(LEFTOVERS) for item in scan(parent))
        for parent in {(folder / unit.name).parent for unit in units}
    }
    for location in [folder / unit.name for unit in units if unit.whole] + [folder / TEMPORARY]:
        if leftovers.get(location.parent):
            FolderSwap(lambda _: None, _remove, REMEDY).sweep(location)


def _install_folder(files: _Files, unit: _Unit, folder: Path, *, replace: bool) -> bool:
    """Install a unit that is a folder, in one step; False if another process did."""

    def check(_: Path) -> None:
        state = _state(files, folder, unit)
        if state == "same":
            raise _PresentError
        if state == "differs" and not replace:
            raise _refusal(folder, [unit])

    final = folder / unit.name
    swap = FolderSwap(check, _remove, REMEDY)
    make_folder(final.parent)
    with suppress(_PresentError), swap.sibling(final) as new:
        cut = len(unit.name) + 1
        files.fill(
            new,
            {path[cut:]: file for path, file in unit.files.items()},
            [path[cut:] for path in unit.folders if path != unit.name],
        )
        swap.install(new, final)
        return True
    return False


def _install_files(files: _Files, units: list[_Unit], folder: Path, *, replace: bool) -> set[str]:
    """Install the files of units one by one, each in one step; return the units that no other process installed."""
    placed: set[str] = set()
    if not units:
        return placed
    swap = FolderSwap(lambda _: None, _remove, REMEDY)
    make_folder(folder)
    with swap.sibling(folder / TEMPORARY) as new:
        together = {path: file for unit in units for path, file in unit.files.items()}
        files.fill(new, together, [path for unit in units for path in unit.folders])
        for unit in units:
            if not replace and any(os.path.lexists(folder / path) for path in unit.files):
                state = _state(files, folder, unit)
                if state == "same":
                    continue
                if state == "differs":
                    raise _refusal(folder, [unit])
            for path in unit.folders:
                make_folder(folder / path)
            for path in sorted(unit.files):
                make_folder((folder / path).parent)
                os.rename(new / path, folder / path)  # noqa: PTH104 - the system call, by its name
            placed.add(unit.name)
    for parent in {(folder / path).parent for path in together}:
        sync_folder(parent)
    return placed


def _units(cache: ThirdPartyCache, contents: Contents) -> list[_Unit]:
    grouped: dict[str, tuple[dict[str, PackedFile], list[str]]] = {}
    for path, file in contents.files.items():
        grouped.setdefault(cache.unit(path), ({}, []))[0][path] = file
    for path in contents.folders:
        grouped.setdefault(cache.unit(path), ({}, []))[1].append(path)
    return [
        _Unit(name, files, tuple(folders), all(path.startswith(f"{name}/") for path in files) and bool(files))
        for name, (files, folders) in sorted(grouped.items())
    ]


def _state(files: _Files, folder: Path, unit: _Unit) -> Literal["absent", "same", "differs"]:
    if unit.whole:
        final = folder / unit.name
        if not os.path.lexists(final):
            return "absent"
        there = _names_below(final, unit.name)
        if there == set() and final.is_dir() and not final.is_symlink():
            return "absent" if unit.files else "same"
        return "same" if there == set(unit.files) and files.same(folder, unit.files) else "differs"
    there = {path for path in unit.files if os.path.lexists(folder / path)}
    if not there:
        return "absent" if unit.files or not all((folder / path).is_dir() for path in unit.folders) else "same"
    if not files.same(folder, {path: unit.files[path] for path in there}):
        return "differs"
    return "same" if there == set(unit.files) else "absent"


def _names_below(final: Path, name: str) -> set[str]:
    """Return the paths of all but the folders below `final`, which is called `name`; for a file or link, its own."""
    if final.is_symlink() or not final.is_dir():
        return {name}
    found: set[str] = set()
    for folder, folders, files in os.walk(final):
        links = [item for item in folders if Path(folder, item).is_symlink()]
        below = Path(folder).relative_to(final).as_posix()
        found |= {f"{name}/{item}" if below == "." else f"{name}/{below}/{item}" for item in (*files, *links)}
    return found


def _refusal(folder: Path, units: list[_Unit]) -> ArtifactError:
    names = ", ".join(repr(unit.name)[:100] for unit in units[:SHOWN])
    more = f" and {len(units) - SHOWN} more" if len(units) > SHOWN else ""
    return ArtifactError(
        f"{folder}: {names}{more} is there with other content; --keep leaves it as it is, --replace puts the packed "
        "one in its place"
    )


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        discard(path)
    else:
        shutil.rmtree(path, ignore_errors=True)


REMEDY = "choose another folder with -o"


class BlobSource(Protocol):
    """A source of a packed cache's files: a store, or a bundle."""

    def path(self, blob: Blob, /) -> Path:
        """Return a file with the content of `blob`, verified."""


class _Files:
    """Compares the files of a packed cache with existing ones, and copies them from their source.

    `progress` counts the bytes compared, and then, from 0, the bytes copied.
    """

    def __init__(self, source: BlobSource, contents: Contents, progress: Progress | None) -> None:
        self._source = source
        self._size = contents.size
        self._total = self._copied = self._compared = 0
        self._progress = progress

    def same(self, folder: Path, files: Mapping[str, PackedFile]) -> bool:
        """Whether regular files with these contents exist. Their modes are not compared."""
        try:
            sizes = all((folder / path).lstat().st_size == file.blob.size for path, file in files.items())
            return sizes and all(
                digest_file(folder / path, self._note_compared) == file.blob.digest for path, file in files.items()
            )
        except OSError:
            return False

    def expect(self, folder: Path, files: Iterable[PackedFile]) -> None:
        """Announce files to be copied to `folder`. Raises CapacityError if its disk has no room for them."""
        self._total = needed = sum(file.blob.size for file in files)
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if needed > (free := shutil.disk_usage(existing).free):
            raise CapacityError(f"{folder}: needs {needed} bytes, {free} are free; free some space, or {REMEDY}")

    def fill(self, folder: Path, files: Mapping[str, PackedFile], empty: Iterable[str]) -> None:
        """Create files and empty folders below an empty folder, durably. Raises OSError and BlobMissingError."""
        folders = {folder / path for path in empty} | {(folder / path).parent for path in files}
        for path in folders:
            path.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(JOBS, thread_name_prefix="llmc-unpack") as pool:
            try:
                for size in pool.map(lambda item: self._copy(folder / item[0], item[1]), files.items()):
                    self._copied += size
                    if self._progress is not None:
                        self._progress(self._copied, self._total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for path in {
            parent for below in folders for parent in (below, *below.parents) if parent.is_relative_to(folder)
        }:
            sync_folder(path)

    def _note_compared(self, count: int) -> None:
        self._compared += count
        if self._progress is not None:
            self._progress(self._compared, self._size)

    def _copy(self, path: Path, file: PackedFile) -> int:
        source = self._source.path(file.blob)
        fd = create_exclusive(path, 0o777 if file.executable else 0o666)
        try:
            with open_regular(source) as stream:
                while piece := stream.read(BUFFER):
                    write_all(fd, piece)
            os.fsync(fd)
        finally:
            os.close(fd)
        return file.blob.size
