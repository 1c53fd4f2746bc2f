"""Lines with user-named fields: nginx and Envoy access logs as JSON, logs of gateways, any CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import chain
from typing import Any

from llmc.buckets.traffic.formats.base import Fields, Found, FoundRows, Head, Location, RequestFormat
from llmc.buckets.traffic.formats.objects import ABSENT, objects, time, tokens
from llmc.buckets.traffic.rows import Rows, shown
from llmc.errors import InputError

MEANINGS = ("prompt", "output", "cached", "time")


def parse(text: str) -> Fields:
    """Parse "prompt=usage.prompt_tokens,output=…" as fields. Raises InputError for invalid text."""
    found: Fields = {}
    for part in text.split(","):
        meaning, equals, name = (piece.strip() for piece in part.partition("="))
        if meaning not in MEANINGS or not equals or not name or meaning in found:
            raise InputError(
                f"--fields {text!r}: {part!r} does not name a field; write prompt=NAME,output=NAME and where there are "
                "any time=NAME,cached=NAME, each once"
            )
        found[meaning] = name
    if not {"prompt", "output"} <= found.keys():
        raise InputError(f"--fields {text!r}: name the fields of both lengths, prompt=NAME,output=NAME")
    return found


class FieldLog(RequestFormat):
    """JSON objects, one per line, or CSV with a header. A name with dots, such as a.b, is field b of object a.

    Lines without a length (health checks, refused requests) are counted and skipped.
    """

    name = "fields"
    title = "lines by field names"
    source = "nginx, ngx_http_log_module: log_format with escape=json; $msec, $time_iso8601 and $time_local"

    def recognises(self, head: Head) -> bool:
        """Return False: the user must name the fields."""
        return False

    def rows(self, path: str, lines: Iterator[str], fields: Fields) -> Rows:
        """Return the rows. Also raises InputError where no line has the named fields."""
        if not fields:
            raise InputError(f"{path}: --traffic-format fields reads the fields that --fields names; give it")
        first = next((line for line in lines if line.strip()), "")
        location = Location(path)
        every = chain([first], lines)
        records = objects(location, every) if first.lstrip().startswith("{") else _table(location, every)
        return FoundRows(location, _found(location, records, fields))


def _found(location: Location, records: Iterator[dict[str, Any]], fields: Fields) -> Iterator[Found]:
    seen = dict.fromkeys(fields, False)
    example: dict[str, Any] | None = None
    for record in records:
        example = record if example is None else example
        values = {meaning: _value(record, name) for meaning, name in fields.items()}
        for meaning, value in values.items():
            seen[meaning] |= value not in ABSENT
        prompt, output, cached = (
            tokens(values.get(meaning), location, fields.get(meaning, "")) for meaning in ("prompt", "output", "cached")
        )
        if prompt and output:
            when = time(values["time"], location, fields["time"]) if "time" in fields else None
            yield when, prompt, output, cached
        else:
            yield None, 0, 0, 0
    missing = [fields[meaning] for meaning in ("prompt", "output") if not seen[meaning]]
    if missing and example is not None:
        raise InputError(
            f"{location.path}: no line has the field {missing[0]!r}; the first has "
            f"{shown(', '.join(map(str, example)))}"
        )


def _value(record: dict[str, Any], name: str) -> object:
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def _table(location: Location, lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    reader = csv.reader(location.counted(lines))
    try:
        header = [name.strip() for name in next(reader, [])]
        for row in reader:
            if row:
                yield dict(zip(header, row, strict=False))
    except csv.Error as error:
        raise InputError(f"{location}: not comma-separated text: {error}; correct or remove the line") from None
