"""The files of a cache: in a folder, and packed as an entry of the store.

    kind       = "foreign-cache"
    components = {"cache": name, "tree": digest, fact: value, …}
    outputs    = {"tree/" path: blob, "image/" path: blob}       files of the cache, and those only for its image
    meta       = {"schema": 1, "executable": [path, …], "folders": [path, …],
                  "image": {"folder": str, "labels": {name: text}}}
    path       = part ("/" part)*      at most 1024 bytes in UTF-8
    part       = 1 to 255 bytes of printable characters, neither "." nor "..", without "/" and "\\"

"tree" is the sha256 of the canonical JSON of {"files": {path: [digest, size, executable]}, "folders": [path, …]}.
"folders" are those without files. So an entry's key identifies its content, and its signature covers every name and
byte. Times, owners and the source folder are not recorded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from llmc.artifacts.digest import Blob, digest_bytes, open_regular
from llmc.artifacts.key import Key, canonical_json
from llmc.artifacts.store.entries import Entry
from llmc.errors import ArtifactError, InputError
from llmc.strict_json import loads

MAX_PATH_BYTES = 1024
MAX_PART_BYTES = 255


def path_problem(path: str) -> str | None:
    """Describe what is wrong with a path; None if it follows the grammar."""
    if not path.isprintable():
        return "it has characters that cannot be printed, or is not UTF-8"
    if len(path.encode()) > MAX_PATH_BYTES:
        return f"it is longer than {MAX_PATH_BYTES} bytes"
    for part in path.split("/"):
        if part in {"", ".", ".."} or "\\" in part:
            return "it leads out of its folder, or is not normalized"
        if len(part.encode()) > MAX_PART_BYTES:
            return f"a part of it is longer than {MAX_PART_BYTES} bytes"
    return None


def paths_problem(files: Collection[str], folders: Iterable[str]) -> str | None:
    """Describe what is wrong with the paths of a tree's files and empty folders; None if all can be created."""
    names = [*files, *folders]
    for path in names:
        if (problem := path_problem(path)) is not None:
            return f"{path!r:.200}: {problem}"
    taken = set(names)
    if len(taken) != len(names):
        return "a path occurs twice"
    for path in names:
        parent = path.rpartition("/")[0]
        while parent:
            if parent in taken:
                return f"{parent!r:.200} is a file, or an empty folder, and has {path!r:.200} in it"
            parent = parent.rpartition("/")[0]
    return None


KIND = "foreign-cache"
SCHEMA = 1
TREE, IMAGE = "tree/", "image/"


class PackedFile(NamedTuple):
    """A file of a packed cache."""

    blob: Blob
    executable: bool


class Contents(NamedTuple):
    """A packed cache: its name, key facts, files and empty folders by path, and its form in an image."""

    cache: str
    facts: Mapping[str, str]
    files: Mapping[str, PackedFile]
    folders: tuple[str, ...]
    image_folder: str
    image_labels: Mapping[str, str]
    image_files: Mapping[str, Blob]

    @property
    def size(self) -> int:
        """Total bytes of all files."""
        return sum(file.blob.size for file in self.files.values())

    @property
    def tree(self) -> str:
        """Digest of names and content."""
        files = {path: [*file.blob, file.executable] for path, file in self.files.items()}
        return digest_bytes(canonical_json({"files": files, "folders": list(self.folders)}))

    def key(self) -> Key:
        """Return the key of the cache's entry."""
        return Key(KIND, {**self.facts, "cache": self.cache, "tree": self.tree})

    def outputs(self) -> dict[str, Blob]:
        """Return the outputs of the cache's entry."""
        found = {TREE + path: file.blob for path, file in self.files.items()}
        return found | {IMAGE + path: blob for path, blob in self.image_files.items()}

    def meta(self) -> dict[str, Any]:
        """Return the meta of the cache's entry."""
        return {
            "schema": SCHEMA,
            "executable": sorted(path for path, file in self.files.items() if file.executable),
            "folders": list(self.folders),
            "image": {"folder": self.image_folder, "labels": dict(self.image_labels)},
        }


def read_contents(entry: Entry, origin: str) -> Contents:
    """Return the cache in an entry, which may come from anywhere. Raises ArtifactError for any other entry."""
    if entry.key.kind != KIND:
        _fail(origin, f"a {entry.key.kind}, not a packed cache")
    schema = entry.meta.get("schema")
    if schema != SCHEMA:
        raise ArtifactError(
            f"{origin}: a cache packed in format {schema!r:.40}, where this llmc reads {SCHEMA}; pack it again with "
            "`llmc cache pack`, or use the version of llmc that packed it"
        )
    try:
        return _read(entry, origin)
    except (KeyError, TypeError, AttributeError) as error:
        _fail(origin, f"its members are not those of a packed cache ({type(error).__name__}: {error})")


def _read(entry: Entry, origin: str) -> Contents:
    facts = {name: value for name, value in entry.key.components.items() if name not in {"cache", "tree"}}
    image = entry.meta["image"]
    executable, folders = frozenset(entry.meta["executable"]), entry.meta["folders"]
    texts = [*facts.values(), *executable, *folders, image["folder"], *image["labels"], *image["labels"].values()]
    if not all(isinstance(text, str) for text in texts):
        _fail(origin, "something in it is not text")
    files: dict[str, PackedFile] = {}
    extra: dict[str, Blob] = {}
    for name, blob in entry.outputs.items():
        if name.startswith(TREE):
            path = name.removeprefix(TREE)
            files[path] = PackedFile(blob, path in executable)
        elif name.startswith(IMAGE):
            extra[name.removeprefix(IMAGE)] = blob
        else:
            _fail(origin, f"it has an output {name!r:.100}")
    problem = paths_problem(files, folders) or paths_problem(extra, ()) or path_problem(image["folder"])
    if problem is not None:
        _fail(origin, f"a path cannot be created: {problem}")
    cache = entry.key.components["cache"]
    contents = Contents(
        str(cache), {name: str(value) for name, value in facts.items()}, files, tuple(folders), image["folder"],
        image["labels"], extra,
    )  # fmt: skip
    if contents.key() != entry.key or contents.meta() != dict(entry.meta):
        _fail(origin, "its files are not what its key says")
    return contents


def _fail(origin: str, problem: str) -> NoReturn:
    raise ArtifactError(f"{origin}: {problem}; pack the cache again with `llmc cache pack`")


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
