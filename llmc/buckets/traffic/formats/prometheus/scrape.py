"""Files with /metrics responses: one scrape, or several in sequence."""

from __future__ import annotations

import re
from collections.abc import Iterator

from llmc.buckets.traffic.formats.base import Head, LengthFormat
from llmc.buckets.traffic.formats.prometheus.exposition import samples
from llmc.buckets.traffic.formats.prometheus.increase import Increase, apart
from llmc.buckets.traffic.formats.prometheus.names import OWN, TOKEN_TYPES, histograms
from llmc.buckets.traffic.length_histogram import LengthHistogram, Lengths
from llmc.buckets.traffic.trace_file import Progress, TraceFile

DURATION = "llmc_sampled_seconds"
"""The series with the duration of a sample by llmc."""

_DURATION = re.compile(rf"^{DURATION} (\d{{1,12}}(?:\.\d{{1,9}})?)$")


class Scrape(LengthFormat):
    """Prometheus' text format, as written by `curl /metrics`.

    Of several scrapes (repeated `curl /metrics >> file`), the increase between the first and the last counts; of one,
    everything that the server has counted.
    """

    name = "prometheus"
    title = "Prometheus metrics (text)"
    source = "Prometheus text exposition format 0.0.4, OpenMetrics 1.0; names: see prometheus/names.py"

    def recognises(self, head: Head) -> bool:
        """Return whether a line has one of the histograms."""
        names = "|".join(map(re.escape, (*histograms(), *TOKEN_TYPES)))
        return re.search(rf"^(?:# TYPE )?(?:{names})(?:_bucket|_sum|_count| )", head.text, re.M) is not None

    def lengths(self, file: TraceFile, progress: Progress | None = None) -> Lengths:
        """Return the histograms of the file."""
        found = Increase(str(file.path))
        duration: list[float] = []

        def lines() -> Iterator[str]:
            for line in file.lines(progress):
                if match := _DURATION.match(line):
                    duration.append(float(match[1]))
                yield line

        for scrape in apart(samples(lines())):
            found.add(scrape)
        return found.lengths(duration[0] if duration else None)


def text(lengths: Lengths) -> str:
    """Return `lengths` as a scrape that reads back, without any label of their server."""
    lines = [] if lengths.duration is None else [f"{DURATION} {lengths.duration:.3f}"]
    for role, histogram in (("prompt", lengths.prompt), ("output", lengths.output)):
        name = next(name for name, of in OWN.items() if of == role)
        lines += [f"# TYPE {name} histogram", *_buckets(name, histogram)]
    return "\n".join(lines) + "\n"


def _buckets(name: str, histogram: LengthHistogram) -> list[str]:
    lines, count, below = [], 0, 0
    for low, high, number in histogram.intervals:
        if low - 1 > below:
            lines.append(f'{name}_bucket{{le="{low - 1}"}} {count}')
        count += number
        if high is not None:
            lines.append(f'{name}_bucket{{le="{high}"}} {count}')
            below = high
    lines.append(f'{name}_bucket{{le="+Inf"}} {count}')
    lines.append(f"{name}_count {count}")
    return lines if histogram.total is None else [*lines, f"{name}_sum {histogram.total}"]
