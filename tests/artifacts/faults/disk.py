"""A model of a disk whose power is cut: what may be found on it afterwards.

The rules are those of POSIX, and of ext4 and XFS in their worst case: the content of a file is safe once the file
was synced, a name once its folder was; of all the rest anything may have reached the disk, a name without the
content of its file too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

CALLS = ("write", "fsync", "rename", "mkdir", "unlink", "link")
REAL = {name: getattr(os, name) for name in CALLS}
LEFT = (("synced", "nothing"), ("all", "nothing"), ("all", "zeros"))


class Disk:
    """Watches the system calls below `root`, an empty folder that is there durably.

    `cut(states)` is called after each call with the folders that the power, cut now, may leave. Whatever was synced
    is held open, so that no inode's number is used twice.
    """

    def __init__(self, root: Path, cut: Callable[[Mapping[str, Path]], None]) -> None:
        self.root = root
        self.cuts = 0
        self._cut = cut
        self._content: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._held: dict[int, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within this block, calls by the names in module os are seen."""
        try:
            with patch.multiple(os, **{name: self._watch(name) for name in CALLS}):
                yield
        finally:
            for held in self._held.values():
                os.close(held)

    def _watch(self, name: str) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            result = REAL[name](*arguments, **named)
            if name == "fsync":
                self._synced(arguments[0])
            with patch.multiple(os, **REAL):
                self.cuts += 1
                folder = self.root.with_name(f"cut {self.cuts}")
                folder.mkdir()
                self._cut({f"{names}, {content}": self._leave(folder, names, content) for names, content in LEFT})
            return result

        return watched

    def _synced(self, fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if not path.is_relative_to(self.root):
            return
        status = os.fstat(fd)
        if status.st_ino not in self._held:
            self._held[status.st_ino] = os.open(path, os.O_RDONLY)
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = {item.name: item.inode() for item in os.scandir(path)}
        else:
            self._content[status.st_ino] = path.read_bytes()

    def _leave(self, folder: Path, names: str, content: str) -> Path:
        """Write what a cut may leave: the names that were synced or all, and of unsynced content so much."""
        locations = {inode: Path(f"/proc/self/fd/{held}") for inode, held in self._held.items()}
        for found, _, files in os.walk(self.root):
            locations |= {path.lstat().st_ino: path for path in [Path(found), *(Path(found, name) for name in files)]}
        target = folder / f"{names} {content}"
        self._copy(self.root.stat().st_ino, target, locations, names, content)
        return target

    def _copy(self, inode: int, target: Path, locations: Mapping[int, Path], names: str, content: str) -> None:
        path = locations[inode]
        if path.is_dir():
            target.mkdir()
            kept = self._names.get(inode, {}) if names == "synced" else {i.name: i.inode() for i in os.scandir(path)}
            for name, below in kept.items():
                if below in locations:
                    self._copy(below, target / name, locations, names, content)
            return
        data = path.read_bytes()
        if content != "all":
            data = self._content.get(inode, b"" if content == "nothing" else bytes(len(data)))
        target.write_bytes(data)
