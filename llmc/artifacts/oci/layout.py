"""Images in a folder: an OCI image layout (OCI image-spec 1.1, image-layout.md), which other tools read and write too.

    <folder>/oci-layout             {"imageLayoutVersion": "1.0.0"}
    <folder>/index.json             {"schemaVersion": 2, "manifests": [descriptor with the annotation REF_NAME, …]}
    <folder>/blobs/sha256/<64 hex>  manifests, configs and layers
    <folder>/.index.lock            empty; held while index.json is changed
    <folder>/.<16 hex>.new          being written, held by flock; those of dead writers are swept

Blobs come first and index.json last, each whole or not at all, so that a reader never sees a part of an image.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from llmc.artifacts.atomic_write import (
    BLOB_MODE,
    create_exclusive,
    discard,
    make_folder,
    sync_folder,
    write_all,
    writing,
)
from llmc.artifacts.digest import PREFIX, parse
from llmc.artifacts.key import canonical_json
from llmc.artifacts.oci.base import MEND, Content, read_small, verified
from llmc.artifacts.oci.image import (
    MANIFEST_TYPE,
    MAX_MANIFEST_BYTES,
    Descriptor,
    describe,
    parse_object,
    read_descriptor,
)  # fmt: skip
from llmc.artifacts.oci.reference import LATEST, LAYOUT, Reference
from llmc.artifacts.oci.tar import PIECE
from llmc.artifacts.store.layout import scan
from llmc.artifacts.store.locks import exclusive
from llmc.errors import ArtifactError

VERSION = "1.0.0"
LAYOUT_FILE = canonical_json({"imageLayoutVersion": VERSION})
"""Content of the file `oci-layout`."""

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
REF_NAME = "org.opencontainers.image.ref.name"
REMEDY = "choose another folder"
ATTEMPTS = 20
FILE_MODE = 0o644
STALE_SECONDS = 60
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.new")


class ImageLayout:
    """The images of one folder (a `base.Images`), which is created on the first write."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(os.path.abspath(folder))  # noqa: PTH100 - links are the user's business
        self._blobs = self._folder / "blobs" / "sha256"
        self.name = f"{LAYOUT}{folder}"

    def close(self) -> None:
        pass

    def manifest(self, reference: Reference) -> bytes | None:
        """Without a tag, return the only image, or else the one tagged `latest`."""
        index = self._index()
        if index is None:
            return None
        if reference.digest is not None:
            found = [item for item in index["manifests"] if item.get("digest") == reference.digest]
        elif reference.tag is None and len(index["manifests"]) == 1:
            found = index["manifests"]
        else:
            found = [item for item in index["manifests"] if _tag(item) == (reference.tag or LATEST)]
        if not found:
            return None
        blob = read_descriptor(found[0], (MANIFEST_TYPE,), MAX_MANIFEST_BYTES, self.name)
        return read_small(self, blob)

    def has(self, blob: Descriptor) -> bool:
        """Whether the blob is intact, by its digest, so that pushing again repairs a damaged one."""
        try:
            with closing(self.read(blob)) as pieces:
                for _ in verified(pieces, blob, self.name):
                    pass
        except ArtifactError:
            return False
        return True

    def read(self, blob: Descriptor) -> Generator[bytes, None, None]:
        path = self._path(blob.digest)
        try:
            with _open_regular(path, blob.size) as file:
                while piece := os.read(file, PIECE):
                    yield piece
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read ({error.strerror}); {MEND}") from error

    def add(self, blob: Descriptor, content: Content) -> None:
        with writing(self._folder, blob.size, REMEDY):
            self._prepare()
            with self._new() as (fd, temporary):
                hasher = hashlib.sha256()
                for piece in content():
                    write_all(fd, piece)
                    hasher.update(piece)
                if (found := PREFIX + hasher.hexdigest()) != blob.digest:
                    raise ArtifactError(
                        f"{self.name}: {blob.digest} changed while it was written, to {found}; try again"
                    )
                os.fchmod(fd, BLOB_MODE)
                self._install(fd, temporary, self._path(blob.digest))

    def publish(self, reference: Reference, manifest: bytes) -> bool:
        """Any number of processes may publish at once: no tag is lost."""
        blob = describe(MANIFEST_TYPE, manifest)
        tag = reference.tag or (None if reference.digest else LATEST)
        if self.has(blob) and self._is_published(blob, tag):
            return False
        self.add(blob, lambda: [manifest])
        entry: dict[str, Any] = {**blob.to_json(), "artifactType": json.loads(manifest)["artifactType"]}
        if tag is not None:
            entry["annotations"] = {REF_NAME: tag}
        with writing(self._folder, len(manifest), REMEDY), exclusive(self._folder / ".index.lock"):
            for _ in range(ATTEMPTS):  # repeated only where locks do nothing and another writer interfered
                self._write_index(entry)
                if self._is_published(blob, tag):
                    return True
        raise ArtifactError(f"{self.name}: other processes keep changing its index.json; push again")

    def _is_published(self, blob: Descriptor, tag: str | None) -> bool:
        items = (self._index() or {"manifests": []})["manifests"]
        return any(item.get("digest") == blob.digest and (tag is None or _tag(item) == tag) for item in items)

    def _write_index(self, entry: dict[str, Any]) -> None:
        index = self._index() or new_index([])
        kept = [item for item in index["manifests"] if _tag(item) != _tag(entry) or _tag(item) is None]
        self._write(self._folder / "index.json", canonical_json({**index, "manifests": [*kept, entry]}))

    def _index(self) -> dict[str, Any] | None:
        path = self._folder / "index.json"
        try:
            with _open_regular(path) as fd, os.fdopen(fd, "rb", closefd=False) as file:
                data = file.read(MAX_MANIFEST_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from error
        return read_index(data, str(path))

    def _prepare(self) -> None:
        if not self._blobs.is_dir() or not (self._folder / "oci-layout").is_file():
            if self._folder.is_dir() and not (self._folder / "index.json").exists() and self._holds_others():
                raise ArtifactError(f"{self._folder}: neither empty nor an image layout; {REMEDY}")
            make_folder(self._blobs)
            self._write(self._folder / "oci-layout", LAYOUT_FILE)
        self._sweep()

    def _sweep(self) -> None:
        """Remove what dead writers left; files younger than a minute may belong to one that has yet to lock them."""
        deadline = time.time() - STALE_SECONDS
        for item in scan(self._folder):
            if not _TEMPORARY.fullmatch(item.name):
                continue
            with suppress(OSError, ArtifactError), _open_regular(Path(item.path)) as file:
                if os.fstat(file).st_mtime < deadline:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    discard(Path(item.path))

    def _holds_others(self) -> bool:
        return any(
            not item.name.startswith(".") and item.name not in {"blobs", "oci-layout"} for item in scan(self._folder)
        )

    def _write(self, path: Path, data: bytes) -> None:
        with self._new() as (fd, temporary):
            write_all(fd, data)
            os.fchmod(fd, FILE_MODE)
            self._install(fd, temporary, path)

    @contextmanager
    def _new(self) -> Iterator[tuple[int, Path]]:
        temporary = self._folder / f".{secrets.token_hex(8)}.new"
        fd = create_exclusive(temporary)
        try:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield fd, temporary
        finally:
            discard(temporary)
            os.close(fd)

    def _install(self, fd: int, temporary: Path, final: Path) -> None:
        os.fsync(fd)
        os.rename(temporary, final)  # noqa: PTH104
        sync_folder(final.parent)

    def _path(self, digest: str) -> Path:
        return self._blobs / parse(digest)


@contextmanager
def _open_regular(path: Path, size: int | None = None) -> Iterator[int]:
    """Open a regular file, of `size` bytes if given; never waits for a pipe or device."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode) or size not in {None, seen.st_size}:
            expected = "a regular file" if size is None else f"a file of {size} bytes"
            raise ArtifactError(f"{path}: not {expected}; {MEND}")
        yield fd
    finally:
        os.close(fd)


def new_index(manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return an index of images from their descriptors as JSON objects."""
    return {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": list(manifests)}


def read_index(data: bytes, origin: str) -> dict[str, Any]:
    """Parse an index.json. Raises ArtifactError for anything but an index."""
    index = parse_object(data, MAX_MANIFEST_BYTES, origin)
    items = index.get("manifests")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ArtifactError(f"{origin}: not the index of an image layout (a list of manifests is missing); {REMEDY}")
    return index


def _tag(item: dict[str, Any]) -> str | None:
    annotations = item.get("annotations")
    tag = annotations.get(REF_NAME) if isinstance(annotations, dict) else None
    return tag if isinstance(tag, str) else None
