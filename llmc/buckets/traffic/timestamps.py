"""Times in traces and logs: seconds from the first one, or absolute moments where a log records enough."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Literal, NamedTuple

_DATE_TIME = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d)(?::(\d\d(?:\.\d+)?))? ?(Z|[+-]\d\d:?\d\d)?", re.ASCII)
_SECONDS = re.compile(r"[0-5]\d(?:\.\d+)?\Z", re.ASCII).match
_MINUTE_LENGTH = len("2023-11-16 18:15:")

MAX_TIME = 1e300
"""Bound on the magnitude of times, so that the time between two of them is finite."""

MIXED_ZONES = {
    True: "has no time zone, and the first time has one; write all times with their zone",
    False: "has a time zone, and the first time has none; write all times with their zone",
}
"""Error for a time that differs from the first, by whether the first has a zone: their distance is unknown."""

Clock = Callable[[object], float]
"""Seconds from the first time to the given one. Raises ValueError, with the reason, for any other value."""


def clock_from(first: object, unit: float = 1.0) -> Clock:
    """Return a clock that starts at `first` and accepts later times of the same kind.

    A kind is an ISO 8601 date-time ("T" or a blank between date and time, any number of decimals, UTC unless it ends in
    an offset; all times of a trace have one, or none has), or a number of `unit` seconds. Raises ValueError, with the
    reason, when `first` is neither.
    """
    if isinstance(first, str) and _DATE_TIME.fullmatch(first.strip()):
        return _DateClock(first).since
    origin = _number(first)
    return lambda value: (_number(value) - origin) * unit


def _number(value: object) -> float:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if abs(number) < MAX_TIME:
            return number
    raise ValueError("is not a number like the seconds 12.5, nor a date-time like 2023-11-16 18:15:46.68")


class _DateClock:
    """Splits a date-time at its minute: whole minutes are parsed once each, and no decimals are lost to the date."""

    def __init__(self, first: str) -> None:
        self._prefix = ""
        self._minute = 0
        self._zoned: bool | None = None
        self._origin = self._parse(first)

    def since(self, value: object) -> float:
        if isinstance(value, str) and value[:_MINUTE_LENGTH] == self._prefix and _SECONDS(value, _MINUTE_LENGTH):
            minute, seconds = self._minute, float(value[_MINUTE_LENGTH:])
        else:
            minute, seconds = self._parse(value)
        return (minute - self._origin[0]) + (seconds - self._origin[1])

    def _parse(self, value: object) -> tuple[int, float]:
        text = value.strip() if isinstance(value, str) else ""
        match = _DATE_TIME.fullmatch(text)
        if match is None:
            raise ValueError("is not a date-time like 2023-11-16 18:15:46.68, as the first one is")
        minute, seconds, offset = match.groups()
        if seconds is not None and not _SECONDS(seconds):
            raise ValueError("has no such second; seconds go from 00 to 59")
        try:
            start = int(datetime.fromisoformat(f"{minute}:00{offset or '+00:00'}").timestamp())
        except ValueError as error:
            raise ValueError(f"is not a date-time: {error}") from None
        if self._zoned is None:
            self._zoned = offset is not None
        elif self._zoned != (offset is not None):
            raise ValueError(MIXED_ZONES[self._zoned])
        if offset is None:
            self._prefix, self._minute = f"{minute}:", start
        return start, float(seconds or 0)


Kind = Literal["utc", "local", "relative"]
"""Origin of a moment: the epoch; the epoch in an unknown time zone; or an origin specific to the log."""

_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(?::(\d\d)((?:[.,]\d+)?))? ?(Z|[+-]\d\d:?\d\d)?", re.ASCII)
_COMMON_LOG = re.compile(r"(\d\d)/([A-Z][a-z]{2})/(\d{4}):(\d\d):(\d\d):(\d\d) ([+-]\d\d)(\d\d)", re.ASCII)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

_UNITS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
"""A number from the first value on has the second as its unit in seconds: 1e11 s is the year 5138, 1e11 ms 1973."""

EPOCH_FROM = 1e8
"""A number of seconds from here on, 1973, counts from the epoch; a smaller one is relative."""


class Moment(NamedTuple):
    """Seconds from the origin that `kind` names."""

    seconds: float
    kind: Kind


DAY = 86_400.0
"""Seconds of a day."""


class Period(NamedTuple):
    """The time of a trace: the moment of its second 0, as far as it is recorded, and the second of its end."""

    start: Moment | None
    seconds: float

    def day(self, second: float) -> int:
        """Return the number of a second's day: 0 for the first, counted from midnight if the start has a date."""
        offset = self.start.seconds % DAY if self.start is not None and self._dated else 0.0
        return int((offset + second) // DAY)

    def date(self, day: int) -> str:
        """Return the date of a day's number; "day 1" for 0 without dates."""
        return self._at(day * DAY)[:10] if self._dated else f"day {day + 1}"

    def __str__(self) -> str:
        if not self._dated:
            return f"{timedelta(seconds=round(self.seconds))} without a date" if self.seconds else "no times"
        zone = " UTC" if self.start is not None and self.start.kind == "utc" else ""
        return f"{self._at(0.0)} to {self._at(self.seconds)}{zone}"

    @property
    def _dated(self) -> bool:
        return self.start is not None and self.start.kind != "relative"

    def _at(self, second: float) -> str:
        origin = 0.0 if self.start is None else self.start.seconds
        return f"{datetime.fromtimestamp(origin + second, UTC):%Y-%m-%d %H:%M:%S}"


def moment(value: object) -> Moment:
    """Parse `value` as a moment.

    Accepts ISO 8601, the common log format's 23/Nov/2026:12:58:01 +0100, and numbers: seconds, or of the size of
    milliseconds, microseconds or nanoseconds since the epoch. Raises ValueError, with the reason, for others.
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
