"""Content digests. Keys, entries and manifests write them as `sha256:<64 lower-case hex digits>`."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

PREFIX = "sha256:"
BUFFER = 1 << 20
_NOT_REGULAR = frozenset({errno.ELOOP, errno.ENXIO})
_GRAMMAR = re.compile(r"sha256:[0-9a-f]{64}")


class Blob(NamedTuple):
    """Digest and size in bytes of a stored file."""

    digest: str
    size: int


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of `data`."""
    return PREFIX + hashlib.sha256(data).hexdigest()


def digest_file(path: str | Path, progress: Callable[[int], None] | None = None) -> str:
    """Return the digest of a file's content; `progress(n)` is called for every `n` bytes read.

    Raises OSError as `open_regular` and reading do.
    """
    with open_regular(path) as file:
        if progress is None and os.fstat(file.fileno()).st_size < BUFFER:
            return digest_bytes(file.read())
        if progress is None:
            return PREFIX + hashlib.file_digest(file, "sha256").hexdigest()
        hasher = hashlib.sha256()
        buffer = bytearray(BUFFER)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            hasher.update(view[:count])
            progress(count)
        return PREFIX + hasher.hexdigest()


class NotRegularError(OSError):
    """The path is a folder, pipe, socket, device or link loop instead of a file."""


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading.

    Raises OSError as `open` does, and NotRegularError for anything but a file. A pipe is refused at once; plain `open`
    would wait for its writer.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise NotRegularError(errno.EINVAL, "not a regular file", str(path)) from error
        raise
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    raise NotRegularError(errno.EINVAL, "not a regular file", str(path))


def is_digest(text: object) -> bool:
    """Whether `text` matches this module's grammar exactly (lower case, no surrounding space)."""
    return isinstance(text, str) and _GRAMMAR.fullmatch(text) is not None


def parse(text: str) -> str:
    """Return the 64 hex digits of a digest, safe as a file name. Raises ValueError for anything else."""
    if not is_digest(text):
        raise ValueError(f"not a digest (sha256:<64 hex digits>): {text!r:.100}")
    return text[len(PREFIX) :]
