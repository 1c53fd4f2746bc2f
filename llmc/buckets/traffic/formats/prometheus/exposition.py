"""Prometheus' text format, reduced to the samples of token histograms.

    sample = name [ "{" label "=" quoted { "," label "=" quoted } "}" ] number [ milliseconds ] [ exemplar ]

Comments, other series, and other lines are skipped, including OpenMetrics' exemplars and "# EOF".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from llmc.buckets.traffic.formats.prometheus.names import Series, series

_SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+)(?:\s+(-?[0-9.]+))?')
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    """The value of one series of a scrape; `time` in seconds since the epoch where the line has it."""

    series: Series
    labels: dict[str, str]
    value: float
    time: float | None


def samples(lines: Iterable[str]) -> Iterator[Sample]:
    """Yield the samples of token histograms in `lines`, in order."""
    for line in lines:
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is None:
            continue
        labels = dict(_LABEL.findall(match[2] or ""))
        known = series(match[1], labels)
        value = number(match[3])
        if known is not None and value is not None:
            time = None if match[4] is None else number(match[4])
            yield Sample(known, labels, value, None if time is None else time / 1000)


def number(text: str) -> float | None:
    """Parse a sample's value; None for anything but a finite number, as in an idle summary."""
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None
