"""The inventory of a store: its content, users and references, on which collections are decided."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.bundle.manifest_schema import FILE_NAME
from llmc.artifacts.bundle.stored import KIND as BUNDLE
from llmc.artifacts.digest import PREFIX, digest_file
from llmc.artifacts.key import Key
from llmc.artifacts.store.entries import Entries
from llmc.artifacts.store.layout import File, Layout, file_of, files_of, scan
from llmc.artifacts.store.leases import bundle_name, entry_name, in_use, name_of_entry
from llmc.artifacts.store.pins import pins


class Item(NamedTuple):
    """The unit of use, pinning and collection: an entry with its bundle folders, or a bundle folder without an entry.

    `names` are its names in leases, `files` all files of its entry, if there is one, and its folders.
    """

    names: frozenset[str]
    used: float
    digests: frozenset[str]
    entry: Path | None
    folders: tuple[Path, ...]
    files: tuple[File, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The entry and the folders."""
        return self.folders if self.entry is None else (self.entry, *self.folders)


class Inventory(NamedTuple):
    """Items by name, blobs by digest, quarantined files, and the names that are in use (`held`) and pinned."""

    items: dict[str, Item]
    blobs: dict[str, File]
    quarantine: dict[Path, tuple[File, ...]]
    held: set[str]
    pinned: set[str]


class Counter:
    """Takes the inventory of one store repeatedly; unchanged files are not read again."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._entries = Entries(layout)
        self._read: dict[str, tuple[File, frozenset[str] | None]] = {}
        self._manifests: dict[Path, tuple[File, str | None]] = {}

    def take(self, now: float, *, sweep: bool = False) -> Inventory:
        """Return the inventory at `now`; `sweep` removes leases of dead processes.

        Leases are read before entries: a process that ended its lease earlier has already published its entry.
        """
        held = in_use(self._layout, now, sweep=sweep)
        items = self._items()
        for folder in scan(self._layout.bundles):
            if folder.is_dir(follow_symlinks=False) and not folder.name.startswith("."):
                self._add_folder(items, Path(folder.path))
        blobs = {}
        for digest, item in self._layout.all_blobs():
            with suppress(OSError):
                blobs[digest] = file_of(item.stat(follow_symlinks=False))
        quarantine = {Path(item.path): tuple(files_of(Path(item.path))) for item in scan(self._layout.quarantine)}
        return Inventory(items, blobs, quarantine, held, {pin.name for pin in pins(self._layout)})

    def _items(self) -> dict[str, Item]:
        items = {}
        for kind, found in self._layout.all_entries():
            name = name_of_entry(kind, found.name[:64])
            with suppress(OSError):
                seen = file_of(found.stat(follow_symlinks=False))
                digests = self._digests(Path(found.path), name, seen)
                if digests is not None:
                    items[name] = Item(frozenset([name]), seen.modified, digests, Path(found.path), (), (seen,))
        return items

    def _digests(self, path: Path, name: str, seen: File) -> frozenset[str] | None:
        """Return the blobs that an entry names; None for a damaged entry."""
        known = self._read.get(name)
        if known is None or (known[0].inode, known[0].changed) != (seen.inode, seen.changed):
            entry = self._entries.load(path, PREFIX + path.stem)
            digests = None if entry is None else frozenset(blob.digest for blob in entry.outputs.values())
            known = self._read[name] = seen, digests
        return known[1]

    def _add_folder(self, items: dict[str, Item], folder: Path) -> None:
        try:
            used = folder.stat().st_mtime
        except OSError:
            return
        name = self._entry_of(folder) or bundle_name(folder)
        whole = items.get(name, Item(frozenset(), used, frozenset(), None, (), ()))
        items[name] = whole._replace(
            names=whole.names | {bundle_name(folder)},
            used=max(whole.used, used),
            folders=(*whole.folders, folder),
            files=(*whole.files, *files_of(folder)),
        )

    def _entry_of(self, folder: Path) -> str | None:
        """Return the name of the entry that has the same manifest as a bundle folder."""
        path = folder / FILE_NAME
        try:
            seen = file_of(path.stat())
            known = self._manifests.get(folder)
            if known is None or known[0] != seen:
                known = self._manifests[folder] = seen, entry_name(Key(BUNDLE, {"manifest": digest_file(path)}))
        except OSError:
            return None
        return known[1]
