"""The contract of a remote: objects by name, in a location that may be far, slow, wrong, or gone.

Names are those of the store's layout below its root ("v1/blobs/sha256/ab/…", "v1/entries/<kind>/<hex>.json"). So the
folder of a `file:` remote is a store, and a store can be a remote. A remote does not verify content; callers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from llmc.artifacts.key import Key
from llmc.artifacts.store.layout import Layout
from llmc.errors import ArtifactError

Progress = Callable[[int], None]
"""Called with the number of bytes moved since the last call; negative if bytes must be moved again."""

Meter = Callable[[int, int], None]
"""Called with the bytes done and the total bytes, from any thread, but one at a time."""

JOBS = 8
"""Default number of concurrent transfers."""

_LAYOUT = Layout("/")


class StoppedError(Exception):
    """Raised in a transfer that must stop because another one failed; never the original cause."""


class RemoteError(ArtifactError):
    """A remote cannot be reached, refuses, or breaks off; the message says which remote and what to do."""


class ObjectError(RemoteError):
    """One object is missing or invalid; the remote itself works."""


class Refused(NamedTuple):
    """Something that was not moved (kind and key of an entry), and why."""

    name: str
    reason: str


class TransferReport(NamedTuple):
    """The entries, blobs and bytes that were moved, the blobs that existed already, and the time taken in seconds.

    `refused` entries were left out because they are damaged, incomplete or not trusted.
    """

    entries: int
    blobs: int
    bytes: int
    skipped_blobs: int
    skipped_bytes: int
    seconds: float
    refused: tuple[Refused, ...] = ()


class Remote(Protocol):
    """Operations on objects. All raise RemoteError if the remote fails, after retrying temporary failures."""

    url: str
    """Its location without credentials: safe to print."""

    def size(self, name: str) -> int | None:
        """Return the bytes of an object, or None if it is missing."""
        ...

    def read(self, name: str, limit: int) -> bytes | None:
        """Return a small object, or None if it is missing. Raises ObjectError if it is larger than `limit` bytes."""
        ...

    def download(self, name: str, start: int, size: int) -> Iterator[bytes]:
        """Yield the content of an object of `size` bytes from byte `start`, in pieces.

        Raises ObjectError if it is missing or has another size; never yields more than `size - start` bytes.
        """
        ...

    def upload(self, name: str, source: Path | bytes, progress: Progress) -> None:
        """Store an object, whole or not at all, replacing an existing one."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names in the folder `prefix`, in no order; none if there is no such folder."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object if it exists."""
        ...


def blob_name(digest: str) -> str:
    """Return the name of a blob in a remote. Raises ValueError for an invalid digest."""
    return _name(_LAYOUT.blob(digest))


def entry_name(key: Key) -> str:
    """Return the name of a key's entry in a remote."""
    return _name(_LAYOUT.entry(key.kind, key.hex))


def entries_prefix(kind: str | None = None) -> str:
    """Return the folder of all entries in a remote, or of those of one kind."""
    return _name(_LAYOUT.entries if kind is None else _LAYOUT.entries / kind)


def temporaries_prefix() -> str:
    """Return the folder in a remote for objects being written."""
    return _name(_LAYOUT.temporaries)


def _name(path: Path) -> str:
    return path.relative_to(_LAYOUT.root).as_posix()
