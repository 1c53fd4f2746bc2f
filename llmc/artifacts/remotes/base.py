"""The contract of a remote: objects by name, in a location that may be far, slow, wrong, or gone. Also its URL.

Names are those of the store's layout below its root ("v1/blobs/sha256/ab/…", "v1/entries/<kind>/<hex>.json"). So the
folder of a `file:` remote is a store, and a store can be a remote. A remote does not verify content; callers do.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from llmc.artifacts.key import Key
from llmc.artifacts.store.layout import Layout
from llmc.errors import ArtifactError, InputError

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

    @classmethod
    def of(
        cls, began: float, entries: int, moved: Collection[int], existing: Collection[int],
        refused: Iterable[Refused] = (),
    ) -> TransferReport:  # fmt: skip
        """Return the report of a transfer that began at this `time.monotonic`, from the bytes of each blob."""
        seconds = time.monotonic() - began
        return cls(entries, len(moved), sum(moved), len(existing), sum(existing), seconds, tuple(refused))


class Remote(Protocol):
    """Operations on objects. All raise RemoteError if the remote fails, after retrying temporary failures."""

    url: str
    """Its location without credentials: safe to print."""

    def size(self, name: str) -> int | None:
        """Return the bytes of an object, or None if it is missing."""

    def read(self, name: str, limit: int) -> bytes | None:
        """Return a small object, or None if it is missing. Raises ObjectError if it is larger than `limit` bytes."""

    def download(self, name: str, start: int, size: int) -> Iterator[bytes]:
        """Yield the content of an object of `size` bytes from byte `start`, in pieces.

        Raises ObjectError if it is missing or has another size; never yields more than `size - start` bytes.
        """

    def upload(self, name: str, source: Path | bytes, progress: Progress) -> None:
        """Store an object, whole or not at all, replacing an existing one."""

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names in the folder `prefix`, in no order; none if there is no such folder."""

    def delete(self, name: str) -> None:
        """Remove an object if it exists."""


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


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_HIDDEN = "***"
_IN_TEXT = (
    (re.compile(r"(://)[^/\s@]*@"), r"\1"),
    (re.compile(r"(?i)\b((?:X-Amz-[A-Za-z-]+|sig|signature|token|password|secret)=)[^&\s'\"]+"), rf"\1{_HIDDEN}"),
    (re.compile(r"(?i)(authorization['\"]?[:=]\s*['\"]?)[^'\"\r\n,}]+"), rf"\1{_HIDDEN}"),
)


class Address(NamedTuple):
    """A parsed URL: its scheme ("" for a path), its full text, the part that may be printed, and its secrets."""

    scheme: str
    full: str
    shown: str
    secrets: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Address({self.shown!r})"

    def clean(self, text: str) -> str:
        """Remove this URL's secrets, and text that looks like credentials of another, from a text."""
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, _HIDDEN)
        for pattern, shown in _IN_TEXT:
            text = pattern.sub(shown, text)
        return " ".join(text.split())


def address(url: str) -> Address:
    """Parse a URL. Raises InputError, without the URL's secrets, if it cannot be read or has no //."""
    match = _SCHEME.match(url)
    if match is None:
        return Address("", url, url, ())
    scheme = match[1].lower()
    if scheme == "file":
        return Address(scheme, url, url, ())
    if (
        scheme != "oci-layout" and "::" not in url and not url[len(match[0]) :].startswith("//")
    ):  # fsspec takes it as a file
        raise InputError(
            f"{scheme}:… is not a remote: write {scheme}://LOCATION/FOLDER, oci-layout:FOLDER for images in a folder, "
            f"or ./{scheme}:… for a folder of that name"
        )
    try:
        parts = urlsplit(url)
        secrets = [parts.query, parts.password or "", unquote(parts.password or "")]
        login, _, host = parts.netloc.rpartition("@")
    except ValueError:
        raise InputError(f"the {scheme} URL cannot be read; write it as {scheme}://LOCATION/FOLDER") from None
    shown = f"{scheme}://{host}{parts.path}" if url[len(match[0]) :].startswith("//") else url
    return Address(scheme, url, shown.rstrip("/"), tuple({item for item in (login, *secrets) if item}))
