"""Recordings, llmc's own format: one made of others, written as it comes."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from llmc.buckets.files import writing
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.reader import record_line
from llmc.errors import InputError


def write(path: str | os.PathLike[str], requests: Iterable[TrafficRequest], *, start: float = 0.0) -> int:
    """Write `requests` as a recording, compressed where the name ends in .gz; returns how many there were.

    `start` is added to the times, which keep microseconds. The file appears whole or not at all: an error of the
    requests, or none of them, leaves what was there. Memory does not grow with the requests. Raises InputError when
    the file cannot be written, and where there is no request.
    """
    number = 0
    with writing(path, "recording") as file, _text(file, Path(path)) as text:
        for request in requests:
            text.write(record_line(request._replace(time=round(start + request.time, 6))))
            number += 1
        if not number:
            raise InputError(f"no request is left to write to {path}; nothing was written")
    return number


@contextmanager
def _text(file: BinaryIO, path: Path) -> Iterator[TextIO]:
    """A text file over `file`; the same requests give the same bytes, compressed too."""
    if path.suffix.lower() == ".gz":
        with gzip.GzipFile("", "wb", 6, file, mtime=0) as compressed, io.TextIOWrapper(compressed, "utf-8") as text:
            yield text
        return
    plain = io.TextIOWrapper(file, "utf-8")
    try:
        yield plain
    finally:
        plain.detach()
