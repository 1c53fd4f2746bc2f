"""Interface of a traffic format: files of servers and gateways, read as one of three kinds of traffic.

    file ──Head──► which format ──► requests   Rows            one row a request            (RequestFormat)
                                ├─► lengths    Lengths         histograms of lengths        (LengthFormat)
                                └─► steps      StepHistogram   steps that a server counted  (StepFormat)

A format that several systems write is one file in this folder and one line in the registry; that of one system is in
its integration.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import PurePath
from typing import Any, ClassVar

from llmc.buckets.traffic.length_histogram import Lengths
from llmc.buckets.traffic.rows import Row, Rows
from llmc.buckets.traffic.step_histogram import StepHistogram
from llmc.buckets.traffic.timestamps import Moment
from llmc.buckets.traffic.trace_file import Progress, TraceFile
from llmc.errors import InputError

Fields = dict[str, str]
"""Names of a request's "prompt", "output", "cached" and "time" in a log, from --fields."""


class Head:
    """The beginning of a file: its name, its first text, and whether that is all of it."""

    def __init__(self, path: str, text: str, whole: bool) -> None:
        self.path = path
        self.text = text
        self.whole = whole

    @property
    def suffix(self) -> str:
        """The last suffix of the name in lower case; for .gz, the suffix before it."""
        suffixes = [suffix.lower() for suffix in PurePath(self.path).suffixes]
        if suffixes and suffixes[-1] == ".gz":
            suffixes.pop()
        return suffixes[-1] if suffixes else ""

    @cached_property
    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects among the first whole lines, one per line; at most 16."""
        lines = self.text.split("\n")
        if not self.whole:
            lines.pop()
        found = []
        for line in lines[:64]:
            if line.lstrip().startswith("{"):
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                found.append(value)
        return found[:16]


class Format(ABC):
    """A file format. `title` is its common name, `source` its specification: project, version, files."""

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    tried: ClassVar[int] = 0
    """Order of detection: formats with a lower number first, ties in registry order."""

    @abstractmethod
    def recognises(self, head: Head) -> bool:
        """Return whether a file with this beginning is in this format."""


class RequestFormat(Format):
    """A format whose files record each request."""

    @abstractmethod
    def rows(self, path: str, lines: Iterator[str], fields: Fields) -> Rows:
        """Return the requests in `lines` of the file `path`. Raises InputError like `Rows`."""


class LengthFormat(Format):
    """A format whose files count lengths by interval."""

    @abstractmethod
    def lengths(self, file: TraceFile, progress: Progress | None = None) -> Lengths:
        """Return the histograms in a file. Raises InputError, naming the file, for invalid contents."""


class StepFormat(Format):
    """A format whose files record the steps of a server."""

    @abstractmethod
    def steps(self, path: str, lines: Iterator[str]) -> StepHistogram:
        """Return the steps in `lines` of the file `path`. Raises InputError where there are none."""


@dataclass
class Location:
    """A reader's position, for messages, and its final notes."""

    path: str
    line: int = 0
    notes: Callable[[], list[str]] = list

    def __str__(self) -> str:
        return f"{self.path}: line {self.line}"

    def counted(self, lines: Iterator[str]) -> Iterator[str]:
        """Yield `lines`, counting them."""
        for line in lines:
            self.line += 1
            yield line


Found = tuple[Moment | None, int, int, int]
"""When a request arrived, and its prompt, output and cached tokens."""


class FoundRows:
    """`Rows` of requests from a reader with its own line handling; all times of a log are of one kind."""

    time_unit = 1.0

    def __init__(self, location: Location, found: Iterator[Found]) -> None:
        self._location = location
        self._found = found
        self._empty = 0
        self._first: Found | None = None
        for one in found:
            if _whole(one):
                self._first = one
                break
            self._empty += 1
        self._moment = None if self._first is None else self._first[0]
        self.time_column = None if self._moment is None else "time"
        self.kind = None if self._moment is None else self._moment.kind

    @property
    def line(self) -> int:
        """The line of the last row."""
        return self._location.line

    @property
    def notes(self) -> list[str]:
        """Notes on skipped contents, once all rows were read."""
        return self._location.notes()

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows in order; those without a prompt or without output have two lengths of 0."""
        yield from repeat((None, 0, 0, 0), self._empty)
        if self._first is None:
            return
        yield self._row(self._first)
        for found in self._found:
            yield self._row(found) if _whole(found) else (None, 0, 0, 0)

    def _row(self, found: Found) -> Row:
        time, prompt, output, cached = found
        kind = None if time is None else time.kind
        if kind != self.kind:
            raise InputError(f"{self._location}: {_DIFFERS[kind]}, unlike the lines before; write all times in one way")
        return (None if time is None else time.seconds, prompt, output, cached)


def _whole(found: Found) -> bool:
    return found[1] > 0 and found[2] > 0


_DIFFERS: dict[str | None, str] = {
    None: "there is no time",
    "utc": "the time has a time zone",
    "local": "the time has no time zone",
    "relative": "the time does not count from the epoch",
}
