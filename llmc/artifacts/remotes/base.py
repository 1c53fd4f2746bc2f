"""The contract of a remote: objects by name in a place that may be far, slow, wrong, or gone.

Names are those of the store's layout below its root ("v1/blobs/sha256/ab/…", "v1/entries/<kind>/<hex>.json"). So the
folder of a `file:` remote is a store, and a store can be a remote. A remote checks no content: callers verify it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from llmc.artifacts.key import Key
from llmc.artifacts.store.layout import Layout
from llmc.errors import ArtifactError

Progress = Callable[[int], None]
"""Told of every further `n` bytes that were moved; negative when bytes have to be moved again."""

Meter = Callable[[int, int], None]
"""Told how many bytes of how many bytes are there by now; called from any thread, by one at a time."""

JOBS = 8
"""Objects that are moved at once, where nothing else is said."""

_LAYOUT = Layout("/")


class StoppedError(Exception):
    """Raised in a transfer that has to stop because another one failed; never the cause by itself."""


class RemoteError(ArtifactError):
    """A remote that cannot be reached, refuses, or breaks off; the message says which remote and what to do."""


class ObjectError(RemoteError):
    """One object that is missing or not what it should be; the remote as such works."""


class Refused(NamedTuple):
    """Something that was not moved (kind and key of an entry), and why."""

    name: str
    reason: str


class TransferReport(NamedTuple):
    """What was moved: entries, blobs and their bytes; blobs that were there already; how long it took in seconds.

    `refused` are entries that stayed behind because they are damaged, incomplete or not trusted.
    """

    entries: int
    blobs: int
    bytes: int
    skipped_blobs: int
    skipped_bytes: int
    seconds: float
    refused: tuple[Refused, ...] = ()


class Remote(Protocol):
    """Few verbs over objects. All raise RemoteError when the remote fails, after retrying what may pass."""

    url: str
    """Where it is, without credentials: safe to print."""

    def size(self, name: str) -> int | None:
        """Bytes of an object, None when it is not there."""
        ...

    def read(self, name: str, limit: int) -> bytes | None:
        """A small object, None when it is not there. Raises ObjectError when it is larger than `limit` bytes."""
        ...

    def download(self, name: str, start: int, size: int) -> Iterator[bytes]:
        """The content of an object of `size` bytes from byte `start`, in pieces.

        Raises ObjectError when it is not there or has another size; never yields more than `size - start` bytes.
        """
        ...

    def upload(self, name: str, source: Path | bytes, progress: Progress) -> None:
        """Store an object, which appears whole or not at all; replaces what was there."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Names that begin with the folder `prefix`, in no order; none when there is no such folder."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object if it is there."""
        ...


def blob_name(digest: str) -> str:
    """The name of a blob in a remote. Raises ValueError for a text that is not a digest."""
    return _name(_LAYOUT.blob(digest))


def entry_name(key: Key) -> str:
    """The name of the entry of a key in a remote."""
    return _name(_LAYOUT.entry(key.kind, key.hex))


def entries_prefix(kind: str | None = None) -> str:
    """The folder of all entries in a remote, or of those of one kind."""
    return _name(_LAYOUT.entries if kind is None else _LAYOUT.entries / kind)


def temporaries_prefix() -> str:
    """The folder in a remote for what is being written."""
    return _name(_LAYOUT.temporaries)


def _name(path: Path) -> str:
    return path.relative_to(_LAYOUT.root).as_posix()
