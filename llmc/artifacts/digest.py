"""Content digests, written `sha256:<64 lower-case hex digits>` in keys, entries and manifests alike."""

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
    """Name and size in bytes of a stored file."""

    digest: str
    size: int


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """Digest of `data`."""
    return PREFIX + hashlib.sha256(data).hexdigest()


def digest_file(path: str | Path, progress: Callable[[int], None] | None = None) -> str:
    """Digest of a file's content, read in pieces; `progress(n)` is told of every `n` bytes read.

    Raises OSError as `open_regular` and read do.
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
    """A folder, pipe, socket, device or circle of links where a file should be."""


def open_regular(path: str | Path) -> BufferedReader:
    """A regular file, opened for reading.

    Raises OSError as open does, and NotRegularError for anything else than a file: a pipe is refused at once, where
    plain open would wait for its writer.
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
    """Whether `text` is a digest by this module's grammar, to the letter (lower case, no space around it)."""
    return isinstance(text, str) and _GRAMMAR.fullmatch(text) is not None


def parse(text: str) -> str:
    """The 64 hex digits of a digest: safe as a file name. Raises ValueError for anything else."""
    if not is_digest(text):
        raise ValueError(f"not a digest (sha256:<64 hex digits>): {text!r:.100}")
    return text[len(PREFIX) :]
