"""Moments as logs write them: absolute where the log says enough, and never of two kinds in one log."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import Literal, NamedTuple

from llmc.buckets.traffic.timestamps import MAX_TIME

Kind = Literal["utc", "local", "relative"]
"""What a moment counts from: the epoch; the epoch in a time zone that is not told; or something of the log's own."""

_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(?::(\d\d)((?:[.,]\d+)?))? ?(Z|[+-]\d\d:?\d\d)?", re.ASCII)
_COMMON_LOG = re.compile(r"(\d\d)/([A-Z][a-z]{2})/(\d{4}):(\d\d):(\d\d):(\d\d) ([+-]\d\d)(\d\d)", re.ASCII)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

_UNITS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
"""A number from the first on counts in the second, of seconds: 1e11 s is the year 5138, 1e11 ms 1973."""

EPOCH_FROM = 1e8
"""A number of seconds from here on, 1973, counts from the epoch; a smaller one is relative."""


class Moment(NamedTuple):
    """Seconds from what `kind` says."""

    seconds: float
    kind: Kind


def moment(value: object) -> Moment:
    """The moment that `value` writes.

    Understood are ISO 8601, the common log format's 23/Nov/2026:12:58:01 +0100, and numbers: seconds, or of the size
    that milliseconds, microseconds or nanoseconds since the epoch have. Raises ValueError, with the reason, for others.
    """
    text = value.strip() if isinstance(value, str) else ""
    if match := _ISO.fullmatch(text):
        date, minute, second, part, offset = match.groups()
        found = datetime.fromisoformat(f"{date} {minute}:{second or '00'}{offset or '+00:00'}").timestamp()
        return Moment(found + float("0" + (part or "").replace(",", ".")), "local" if offset is None else "utc")
    if match := _COMMON_LOG.fullmatch(text):
        return Moment(_common_log(match), "utc")
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = MAX_TIME
        if abs(number) < MAX_TIME:
            number *= next((unit for least, unit in _UNITS if abs(number) >= least), 1.0)
            return Moment(number, "utc" if number >= EPOCH_FROM else "relative")
    raise ValueError("is neither a date-time like 2023-11-16T18:15:46Z nor a number like the seconds 1700158546.68")


def _common_log(match: re.Match[str]) -> float:
    day, month, year, hour, minute, second, hours, minutes = match.groups()
    if month not in _MONTHS:
        raise ValueError(f"is not a date-time: there is no month {month}")
    offset = timedelta(hours=int(hours), minutes=int(hours[0] + minutes))
    date = datetime(
        int(year), _MONTHS.index(month) + 1, int(day), int(hour), int(minute), int(second), tzinfo=timezone(offset)
    )
    return date.timestamp()
