"""Step statistics of tpu-inference, from AGGREGATED_STATS_DIR: all_batches_stats_*.jsonl, one step per line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from llmc.buckets.traffic.formats.base import Head, Location, StepFormat
from llmc.buckets.traffic.formats.objects import objects, tokens
from llmc.buckets.traffic.step_histogram import StepHistogram, StepKey, StepPhase
from llmc.errors import InputError

REAL, PADDED, REQUESTS = "total_num_scheduled_tokens", "padded_total_num_scheduled_tokens", "num_reqs"
PREFILL, DECODE = "num_prefill_tokens", "num_decode_tokens"

MAX_SHAPES = 1 << 18
"""Most distinct steps."""


class TpuSteps(StepFormat):
    """Steps of (tokens, requests), with their padded tokens; the requests' padding is not recorded."""

    name = "tpu-steps"
    title = "tpu-inference batch statistics"
    source = "tpu-inference 020e476, tpu_inference/runner/utils.py (AggregatedStatsLogger)"
    tried = -1

    def recognises(self, head: Head) -> bool:
        return bool(head.objects) and {REAL, PADDED, REQUESTS} <= head.objects[0].keys()

    def steps(self, path: str, lines: Iterator[str]) -> StepHistogram:
        counts: Counter[StepKey] = Counter()
        location = Location(path)
        for record in objects(location, lines):
            real, padded, requests, prefill, decode = (
                tokens(record.get(name), location, name) for name in (REAL, PADDED, REQUESTS, PREFILL, DECODE)
            )
            if not real:
                continue
            if padded < real:
                raise InputError(
                    f"{location}: {real} tokens were padded to {padded}, which are fewer; the line is damaged"
                )
            phase: StepPhase = "any" if prefill and decode else "prompt" if prefill else "decode"
            counts[StepKey(phase, (real, requests), (padded, requests))] += 1
            if len(counts) > MAX_SHAPES:
                raise InputError(f"{path}: has more than {MAX_SHAPES} distinct steps; give a part of the file")
        if not counts:
            raise InputError(f"{path}: no line reports a step with {REAL}; start the server with AGGREGATED_STATS_DIR")
        return StepHistogram(("tokens", "requests"), counts)
