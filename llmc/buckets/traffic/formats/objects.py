"""Shared parsing for formats of JSON lines: objects, and values that may be missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from llmc.buckets.traffic.formats.base import Location
from llmc.buckets.traffic.rows import LENGTH_BITS, shown
from llmc.buckets.traffic.timestamps import Moment, moment
from llmc.errors import InputError

ABSENT = (None, "", "-")
"""Spellings of a missing value; proxies write "-"."""


def objects(location: Location, lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line; lines that do not start an object are skipped, as in access logs.

    Raises InputError, naming the line, for a damaged object.
    """
    for line in location.counted(lines):
        if not line.lstrip().startswith("{"):
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{location}, column {error.colno}: not valid JSON: {error.msg}; correct or remove the line"
            ) from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{location}: not valid JSON: {error}; correct or remove the line") from None


def tokens(value: object, location: Location, name: str) -> int:
    """Return a number of tokens, written as a number or as text; 0 where it is absent.

    Raises InputError, naming the line and the field, for an invalid length.
    """
    if value in ABSENT:
        return 0
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
            if 0 <= number < 1 << LENGTH_BITS and number == int(number):
                return int(number)
        except (ValueError, OverflowError):
            pass
    raise InputError(
        f"{location}, field {name!r}: found {shown(value)}, which is not a number of tokens (whole, 0 or more, below "
        f"2^{LENGTH_BITS}); correct or remove the line"
    )


def time(value: object, location: Location, name: str) -> Moment | None:
    """Return the moment in a field; None where it is absent. Raises InputError, naming the line and the field."""
    if value in ABSENT:
        return None
    try:
        return moment(value)
    except ValueError as error:
        raise InputError(f"{location}, field {name!r}: {shown(value)} {error}; correct or remove the line") from None
