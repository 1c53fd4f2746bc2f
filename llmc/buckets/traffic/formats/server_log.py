"""vLLM's log lines: when they were written, by which process, and what they say."""

from __future__ import annotations

import re

from llmc.buckets.traffic.timestamps import Moment

PREFIX = re.compile(
    r"(?:\((\w+(?: rank=\d+)?) pid=(\d+)\)(?:\x1b\[[\d;]*m)? )?"
    r"(?:\x1b\[[\d;]*m)?(?:DEBUG|INFO|WARNING|ERROR)(?:\x1b\[[\d;]*m)? (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)",
    re.ASCII,
)
"""A line of vLLM's log as its issues and documents show it: process, level (coloured on a terminal), month-day and time
without a year, [file:line], message."""

_DAYS_BEFORE = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)
_DAY = 86_400


class LogClock:
    """Moments of the lines of one log, which come in order, over a new year too. They tell no year and no time zone."""

    def __init__(self) -> None:
        self._added = 0
        self._last = 0.0
        self._leap = False

    def read(self, line: str) -> Moment | None:
        """When `line` was written; None for a line that does not tell."""
        match = PREFIX.search(line, 0, 512)
        if match is None:
            return None
        month, day, hour, minute, second = (int(match[group]) for group in range(3, 8))
        self._leap |= (month, day) == (2, 29)
        days = _DAYS_BEFORE[(month - 1) % 12] + day + (self._leap and month > 2)
        now = self._added + days * _DAY + hour * 3600 + minute * 60 + second
        if now < self._last - 180 * _DAY:
            self._added += 365 * _DAY
            now += 365 * _DAY
            self._leap = False
        self._last = max(self._last, now)
        return Moment(float(now), "relative")


def process(line: str) -> tuple[str, str]:
    """Which process wrote `line`: its name, as "Worker_TP0" or "VllmWorker rank=0", and its number; "" if not told."""
    match = PREFIX.search(line, 0, 512)
    return ("", "") if match is None or match[1] is None else (match[1], match[2])
