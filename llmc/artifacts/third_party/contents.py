"""A packed cache as an entry of the store.

    kind       = "foreign-cache"
    components = {"cache": name, "tree": digest, fact: value, …}
    outputs    = {"tree/" path: blob, "image/" path: blob}       files of the cache, and those for its image alone
    meta       = {"schema": 1, "executable": [path, …], "folders": [path, …],
                  "image": {"folder": str, "labels": {name: text}}}

"tree" is the sha256 of the canonical JSON of {"files": {path: [digest, size, executable]}, "folders": [path, …]}.
"folders" are those without files; paths are by the grammar in names.py. So an entry's key says what is in it, and its
signature covers every name and byte. Times, owners and the folder that it was packed from are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from llmc.artifacts.digest import Blob, digest_bytes
from llmc.artifacts.key import Key, canonical_json
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.third_party.names import path_problem, paths_problem
from llmc.errors import ArtifactError

KIND = "foreign-cache"
SCHEMA = 1
TREE, IMAGE = "tree/", "image/"


class PackedFile(NamedTuple):
    """A file of a packed cache."""

    blob: Blob
    executable: bool


class Contents(NamedTuple):
    """A packed cache: its name, key facts, files and empty folders by path, and how it lies in an image."""

    cache: str
    facts: Mapping[str, str]
    files: Mapping[str, PackedFile]
    folders: tuple[str, ...]
    image_folder: str
    image_labels: Mapping[str, str]
    image_files: Mapping[str, Blob]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.blob.size for file in self.files.values())

    @property
    def tree(self) -> str:
        """The digest of names and content."""
        files = {path: [*file.blob, file.executable] for path, file in self.files.items()}
        return digest_bytes(canonical_json({"files": files, "folders": list(self.folders)}))

    def key(self) -> Key:
        """The key of its entry."""
        return Key(KIND, {**self.facts, "cache": self.cache, "tree": self.tree})

    def outputs(self) -> dict[str, Blob]:
        """The outputs of its entry."""
        found = {TREE + path: file.blob for path, file in self.files.items()}
        return found | {IMAGE + path: blob for path, blob in self.image_files.items()}

    def meta(self) -> dict[str, Any]:
        """The meta of its entry."""
        return {
            "schema": SCHEMA,
            "executable": sorted(path for path, file in self.files.items() if file.executable),
            "folders": list(self.folders),
            "image": {"folder": self.image_folder, "labels": dict(self.image_labels)},
        }


def read_contents(entry: Entry, origin: str) -> Contents:
    """The cache that an entry is, which may come from anywhere. Raises ArtifactError for any other entry."""
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
        _fail(origin, f"a path cannot be made: {problem}")
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
