"""The rows of a trace, CSV or JSON lines, as numbers: every error names the file, the line and the column.

Both readers have a fast path for valid rows; only when it fails is the row examined to explain the error.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple, NoReturn, Protocol

from llmc.errors import InputError

SPELLINGS: dict[str, tuple[str, ...]] = {
    "time": (
        *("time", "timestamp", "arrival", "arrived_at", "arrival_time", "arrival_timestamp"),
        *("request_time", "start_time", "submit_time"),
    ),
    "prompt": (
        *("prompt_tokens", "context_tokens", "request_tokens", "input_tokens", "prefill_tokens"),
        *("num_prompt_tokens", "num_input_tokens", "num_prefill_tokens"),
        *("prompt_len", "prompt_length", "input_len", "input_length"),
    ),
    "output": (
        *("output_tokens", "generated_tokens", "response_tokens", "completion_tokens", "decode_tokens"),
        *("num_output_tokens", "num_generated_tokens", "num_completion_tokens", "num_decode_tokens"),
        *("output_len", "output_length", "completion_len", "completion_length", "response_len", "response_length"),
    ),
    "cached": ("cached_tokens", "cached_prompt_tokens", "prefix_tokens", "num_cached_tokens", "cached_len"),
}
"""Accepted column names for each value of a request; llmc writes the first.

A name is compared in lower case and without anything but letters and digits, so that "Request tokens",
"request_tokens" and "RequestTokens" are one. Columns that mean none of the four are ignored.
"""

SHOWN = 12
"""Most columns that a message lists."""


class Columns(NamedTuple):
    """Indices of the columns in their header or record; None where there is no such column."""

    time: int | None
    prompt: int
    output: int
    cached: int | None


def resolve(names: Sequence[str], where: str) -> Columns:
    """Return the columns among `names`; `where` ("trace.csv: line 1") opens messages.

    Raises InputError, listing the names, when the prompt or the output column is missing or two names mean the same.
    """
    indices: dict[str, int] = {}
    for index, name in enumerate(names):
        meaning = _MEANINGS.get(_plain(name))
        if meaning is None:
            continue
        if meaning in indices:
            raise InputError(
                f"{where}: the columns {names[indices[meaning]]!r} and {name!r} both mean the {meaning}; "
                "remove or rename one"
            )
        indices[meaning] = index
    for meaning in ("prompt", "output"):
        if meaning not in indices:
            raise InputError(
                f"{where}: no column for the {meaning} tokens; found {_listed(names)}; "
                f"name one of them {', '.join(SPELLINGS[meaning])}"
            )
    return Columns(indices.get("time"), indices["prompt"], indices["output"], indices.get("cached"))


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


_MEANINGS = {_plain(spelling): meaning for meaning, spellings in SPELLINGS.items() for spelling in spellings}


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "none"
    shown = [name if len(name) <= 40 else name[:37] + "..." for name in names[:SHOWN]]
    return ", ".join(map(repr, shown)) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


LENGTH_BITS = 31
"""A length is below 2^31 tokens; a larger number is another column's."""

MAX_LAYOUTS = 64
"""Sets of keys whose columns a JSON lines reader caches."""

Row = tuple[object, int, int, int]
"""The time as written or None, then prompt, output and cached tokens, each from 0 to 2^31 − 1."""


class Rows(Protocol):
    """The rows of one pass over a trace.

    `line` is the physical line, from 1, where the last row ended; `time_column` is the name of the times (None if there
    are none) and `time_unit` their unit in seconds. The constructor raises InputError when the columns are unclear,
    iteration for an invalid row.
    """

    time_column: str | None
    time_unit: float

    @property
    def line(self) -> int:
        """The line of the last row."""
        ...

    def __iter__(self) -> Iterator[Row]:
        """Yield the remaining rows in order, without blank lines."""
        ...


class CsvRows:
    """Rows of comma-separated text with a header; `path` names it in messages."""

    time_unit = 1.0

    def __init__(self, path: str, lines: Iterator[str]) -> None:
        self._path = path
        self._reader = csv.reader(lines)
        self._header = self._read_header()
        self._columns = resolve(self._header, f"{path}: line {self.line}")
        time = self._columns.time
        self.time_column = None if time is None else self._header[time]

    @property
    def line(self) -> int:
        """The line of the last row."""
        return self._reader.line_num

    def __iter__(self) -> Iterator[Row]:
        """Yield the remaining rows in order, without blank lines."""
        time, prompt, output, cached = self._columns
        width = len(self._header)
        try:
            for row in self._reader:
                try:
                    lengths = int(row[prompt]), int(row[output]), int(row[cached]) if cached is not None else 0
                    good = len(row) == width and (lengths[0] | lengths[1] | lengths[2]) >> LENGTH_BITS == 0
                except (ValueError, IndexError):
                    good = False
                if not good:
                    if _blank(row):
                        continue
                    lengths = self._explain(row)
                yield (None if time is None else row[time], *lengths)
        except csv.Error as error:
            self._broken(error)

    def _read_header(self) -> list[str]:
        try:
            for row in self._reader:
                if not _blank(row):
                    return [name.strip() for name in row]
        except csv.Error as error:
            self._broken(error)
        raise InputError(f"{self._path}: the file is empty; a trace has a header line and a line for each request")

    def _explain(self, row: list[str]) -> tuple[int, int, int]:
        """The lengths of an unusual but valid row ("44.0"); InputError for any other."""
        if len(row) < len(self._header) or any(extra.strip() for extra in row[len(self._header) :]):
            raise InputError(
                f"{self._path}: line {self.line}: {len(row)} fields where the header has {len(self._header)}; "
                "correct or remove the line"
            )
        _, prompt, output, cached = self._columns
        where = f"{self._path}: line {self.line}"
        return (
            length(row[prompt], where, self._header[prompt]),
            length(row[output], where, self._header[output]),
            length(row[cached] or 0, where, self._header[cached]) if cached is not None else 0,
        )

    def _broken(self, error: csv.Error) -> NoReturn:
        raise InputError(
            f"{self._path}: line {self.line}: not comma-separated text: {error}; correct the line, or name the file "
            ".jsonl if it holds JSON lines"
        ) from None


class JsonRows:
    """Rows of JSON lines, one object each; the columns are its keys, and each object may have its own set of them.

    A number in `timestamp` is in milliseconds when the object spells its lengths `input_length` and `output_length`, as
    in Mooncake's traces; every other time is in seconds.
    """

    def __init__(self, path: str, lines: Iterator[str]) -> None:
        self._path = path
        self.line = 0
        self._layouts: dict[tuple[str, ...], tuple[str | None, str, str, str | None]] = {}
        for text in lines:
            self.line += 1
            if text.strip():
                break
        else:
            raise InputError(f"{path}: the file is empty; a trace has a JSON object on a line for each request")
        first = self._object(text)
        self.time_column = self._layout(tuple(first))[0]
        mooncake = self.time_column == "timestamp" and {"input_length", "output_length"} <= first.keys()
        self.time_unit = 0.001 if mooncake else 1.0
        self.line -= 1
        self._lines = chain([text], lines)

    def __iter__(self) -> Iterator[Row]:
        """Yield the remaining rows in order, without blank lines."""
        layouts = self._layouts
        decode = json.JSONDecoder().decode
        for text in self._lines:
            self.line += 1
            try:
                record = decode(text)
                time, prompt, output, cached = layouts[tuple(record)]
                lengths = record[prompt], record[output], record[cached] if cached is not None else 0
                good = (
                    type(lengths[0]) is type(lengths[1]) is type(lengths[2]) is int
                    and (lengths[0] | lengths[1] | lengths[2]) >> LENGTH_BITS == 0
                )
            except (ValueError, TypeError, KeyError, RecursionError):
                good = False
            if not good:
                if not text.strip():
                    continue
                record = self._object(text)
                time, prompt, output, cached = self._layout(tuple(record))
                where = f"{self._path}: line {self.line}"
                lengths = (
                    length(record[prompt], where, prompt),
                    length(record[output], where, output),
                    length(0 if record[cached] is None else record[cached], where, cached) if cached is not None else 0,
                )
            yield (None if time is None else record[time], *lengths)

    def _object(self, text: str) -> dict[str, object]:
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{self._path}: line {self.line}, column {error.colno}: not valid JSON: {error.msg}; "
                "write one JSON object a line"
            ) from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self._path}: line {self.line}: not valid JSON: {error}; correct the line") from None
        if not isinstance(record, dict):
            raise InputError(
                f"{self._path}: line {self.line}: {shown(record)} is not a JSON object; write one object a line"
            )
        return record

    def _layout(self, keys: tuple[str, ...]) -> tuple[str | None, str, str, str | None]:
        """The names of time, prompt, output and cached among the keys of an object."""
        known = self._layouts.get(keys)
        if known is not None:
            return known
        columns = resolve(keys, f"{self._path}: line {self.line}")
        time = None if columns.time is None else keys[columns.time]
        if self._layouts and time != self.time_column:
            raise InputError(
                f"{self._path}: line {self.line}: the time is in {time or 'no column'}, but in "
                f"{self.time_column or 'no column'} in the lines before; write it the same way in all lines"
            )
        names = (
            time,
            keys[columns.prompt],
            keys[columns.output],
            None if columns.cached is None else keys[columns.cached],
        )
        if len(self._layouts) < MAX_LAYOUTS:
            self._layouts[keys] = names
        return names


def length(value: object, where: str, column: str) -> int:
    """Parse `value` as a number of tokens. Raises InputError, naming location and column, when it is invalid."""
    number: int | float | None = None
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    if number is not None and 0 <= number < 1 << LENGTH_BITS and number == int(number):
        return int(number)
    found = "nothing" if value is None or value == "" else shown(value)
    raise InputError(
        f"{where}, column {column!r}: found {found}, which is not a number of tokens (whole, 0 or more, below "
        f"2^{LENGTH_BITS}); correct or remove the line"
    )


def shown(value: object) -> str:
    """Return `value` for a message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _blank(row: list[str]) -> bool:
    return not row or (len(row) == 1 and not row[0].strip())
