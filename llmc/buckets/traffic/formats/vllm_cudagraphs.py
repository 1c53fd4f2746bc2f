"""The table of vLLM's --cudagraph-metrics: tokens of steps before and after padding, and how they ran."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from llmc.buckets.traffic.formats.base import Head, Place, StepFormat
from llmc.buckets.traffic.step_histogram import StepHistogram, StepKey
from llmc.errors import InputError

HEADER = re.compile(
    r"\|\s*Unpadded Tokens\s*\|\s*Padded Tokens\s*\|\s*Num Paddings\s*\|\s*Runtime Mode\s*\|\s*Count\s*\|"
)
ROW = re.compile(r"\|\s*(\d{1,9})\s*\|\s*(\d{1,9})\s*\|\s*(\d{1,9})\s*\|\s*(\w+)\s*\|\s*(\d{1,12})\s*\|")

EAGER = "NONE"
"""The runtime mode of steps that ran without a graph."""


class VllmCudagraphs(StepFormat):
    """Every table in a server's log; each counts the steps since the one before it, and all are added up.

    The first engine of each process prints its own; with data parallelism the engines' steps are added up too.
    """

    name = "vllm-cudagraphs"
    title = "vLLM --cudagraph-metrics table"
    source = "vLLM 018fe84, vllm/compilation/cuda_graph.py"

    def recognises(self, head: Head) -> bool:
        """Whether there is a table's header."""
        return HEADER.search(head.text) is not None

    def steps(self, path: str, lines: Iterator[str]) -> StepHistogram:
        """The steps of all tables."""
        counts: Counter[StepKey] = Counter()
        eager = 0
        place = Place(path)
        for line in place.counted(lines):
            match = ROW.search(line)
            if match is None:
                continue
            real, padded, more, count = (int(match[group]) for group in (1, 2, 3, 5))
            if padded != real + more:
                raise InputError(f"{place}: {real} tokens and {more} paddings are not {padded}; the table is damaged")
            eager += count if match[4] == EAGER else 0
            counts[StepKey("any", (real,), (padded,))] += count
        if not counts:
            raise InputError(
                f"{path}: no table of CUDA graphs has a row; start vLLM with --cudagraph-metrics, and without "
                "--disable-log-stats"
            )
        notes = (f"{eager} of {counts.total()} steps ran without a graph",) if eager else ()
        return StepHistogram(("tokens",), counts, notes=notes)
