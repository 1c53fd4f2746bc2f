"""The files of a cache in a folder: only regular files, scanned before and after they are read."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.digest import open_regular
from llmc.artifacts.third_party.contents import path_problem
from llmc.errors import ArtifactError, InputError
from llmc.strict_json import loads

MAX_FILES = 50_000
"""Most files of one packed cache: an entry of the store has no room for more names."""

MAX_TEXT_BYTES = 8 << 20
_KINDS = {
    stat.S_IFLNK: "a symbolic link", stat.S_IFBLK: "a device", stat.S_IFCHR: "a device", stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}  # fmt: skip


class TreeFile(NamedTuple):
    """The status of a file: size in bytes, whether its owner may execute it, inode and modification time (ns)."""

    size: int
    executable: bool
    inode: int
    modified: int


class Tree(NamedTuple):
    """The files below `root` by path, sorted, and the folders without files."""

    root: Path
    files: Mapping[str, TreeFile]
    folders: tuple[str, ...]

    def without(self, units: Mapping[str, str], unit: Callable[[str], str]) -> Tree:
        """Return the tree without some units."""
        files = {path: file for path, file in self.files.items() if unit(path) not in units}
        return Tree(self.root, files, tuple(path for path in self.folders if unit(path) not in units))

    def text(self, path: str) -> bytes:
        """Return the content of a small file. Raises ArtifactError if it is over 8 MiB or cannot be read."""
        data = self.head(path, MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise ArtifactError(f"{self.root / path}: larger than {MAX_TEXT_BYTES} bytes, which no file of its kind is")
        return data

    def head(self, path: str, count: int) -> bytes:
        """Return the first bytes of a file. Raises ArtifactError if it cannot be read."""
        try:
            with open_regular(self.root / path) as file:
                return file.read(count)
        except OSError as error:
            raise ArtifactError(f"{self.root / path}: cannot be read ({error.strerror})") from error

    def json_object(self, path: str) -> dict[str, object] | None:
        """Return the JSON object in a small file; None for anything else."""
        try:
            found = loads(self.text(path))
        except ValueError:
            return None
        return found if isinstance(found, dict) else None


def scan_tree(root: Path, leaves_out: Callable[[str], bool], limit: int = MAX_FILES) -> Tree:
    """Return the files below `root`, without the files and folders for which `leaves_out` is true.

    Raises InputError if there is no such folder, or for more than `limit` files; ArtifactError for a link, a device and
    a name that cannot be packed.
    """
    if not root.is_dir():
        raise InputError(f"{root}: no such folder; name the folder that the server keeps its cache in")
    files: dict[str, TreeFile] = {}
    folders: list[str] = []
    pending = [""]
    while pending:
        folder = pending.pop()
        empty = True
        for item in _items(root / folder, root):
            path = f"{folder}/{item.name}" if folder else item.name
            if leaves_out(path):
                continue
            empty = False
            if (problem := path_problem(path)) is not None:
                raise ArtifactError(f"{root}: {path!r:.200} cannot be packed: {problem}")
            seen = _stat(item, root)
            if stat.S_ISDIR(seen.st_mode):
                pending.append(path)
            elif stat.S_ISREG(seen.st_mode):
                files[path] = _file(seen)
                if len(files) > limit:
                    raise InputError(
                        f"{root}: more than {limit} files; pack its parts one by one, or empty the cache and fill it "
                        "with what is used"
                    )
            else:
                what = _KINDS.get(stat.S_IFMT(seen.st_mode), "no file")
                raise ArtifactError(f"{root / path}: {what}; only files can be packed, so replace or remove it")
        if empty and folder:
            folders.append(folder)
    return Tree(root, dict(sorted(files.items())), tuple(sorted(folders)))


def require_unchanged(before: Tree, leaves_out: Callable[[str], bool]) -> None:
    """Raise ArtifactError if a tree changed since it was scanned: a server is still writing to it."""
    now = scan_tree(before.root, leaves_out)
    changed = sorted(
        {path for path, _ in before.files.items() ^ now.files.items()} | {*before.folders} ^ {*now.folders}
    )
    if changed:
        raise ArtifactError(
            f"{before.root}: {changed[0]!r:.200} changed while the cache was packed; stop the server that writes it, "
            "or pack it again when it has warmed up"
        )


def _items(folder: Path, root: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            yield from items
    except OSError as error:
        raise _gone(folder, root, error) from error


def _stat(item: os.DirEntry[str], root: Path) -> os.stat_result:
    try:
        return item.stat(follow_symlinks=False)
    except OSError as error:
        raise _gone(Path(item.path), root, error) from error


def _gone(path: Path, root: Path, error: OSError) -> ArtifactError:
    if isinstance(error, FileNotFoundError):
        return ArtifactError(f"{root}: {path.name!r:.200} disappeared while the cache was packed; stop its server")
    return ArtifactError(f"{path}: cannot be read ({error.strerror}); run llmc as a user who may read the cache")


def _file(seen: os.stat_result) -> TreeFile:
    return TreeFile(seen.st_size, bool(seen.st_mode & stat.S_IXUSR), seen.st_ino, seen.st_mtime_ns)
