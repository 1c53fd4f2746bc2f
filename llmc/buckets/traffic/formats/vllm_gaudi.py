"""What vLLM on Gaudi logs of its buckets: those that were missing, and those that it warmed up."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from llmc.buckets.traffic.formats.base import Head, StepFormat
from llmc.buckets.traffic.step_histogram import Shape, StepHistogram, StepKey, StepPhase
from llmc.errors import InputError

_TRIPLE = r"\((\d{1,9}), (\d{1,9}), (\d{1,9})\)"
MISSING = re.compile(rf"\b(Prompt|Decode) bucket for {_TRIPLE} was not prepared\. Adding new bucket:? {_TRIPLE}")
COLD = re.compile(r"Configuration: \('?(prompt|decode)'?, (\d{1,9}), (\d{1,9}), (\d{1,9})\) was not warmed-up!")
WARMUP = re.compile(
    r"\[Warmup\]\[[^\]]*(Prompt|Decode)[^\]]*\]\[\d+/\d+\] "
    r"batch_size:(\d{1,9}) query_len:(\d{1,9}) num_blocks:(\d{1,9})"
)
PHASES: dict[str, StepPhase] = {"prompt": "prompt", "decode": "decode"}

MAX_SHAPES = 100_000
"""Distinct shapes that are kept; a server prepares a few thousand at most."""


class VllmGaudi(StepFormat):
    """Steps of (batch, query, blocks) that no prepared bucket covered, and the bucket that was added for each.

    A bucket that was added serves the steps after it too, so each miss stands for one compilation, and not for how
    often its shape was asked for. "was not warmed-up" names a bucket that was compiled in traffic although it is in the
    list. Warm-up lines tell what was prepared.
    """

    name = "vllm-gaudi"
    title = "vLLM on Gaudi's log of buckets"
    source = "vllm-gaudi 000dfe0, extension/bucketing/common.py, and its v1/worker/hpu_model_runner.py"

    def recognises(self, head: Head) -> bool:
        """Whether a line tells of a bucket."""
        return any(known.search(head.text) is not None for known in (MISSING, COLD, WARMUP))

    def steps(self, path: str, lines: Iterator[str]) -> StepHistogram:
        """The misses, and the buckets that were warmed up."""
        counts: Counter[StepKey] = Counter()
        prepared: dict[StepPhase, dict[Shape, None]] = {"prompt": {}, "decode": {}}
        cold = 0
        for line in lines:
            if match := MISSING.search(line):
                numbers = tuple(int(number) for number in match.groups()[1:])
                counts[StepKey(PHASES[match[1].lower()], numbers[:3], numbers[3:])] += 1
            elif match := COLD.search(line):
                shape = tuple(int(number) for number in match.groups()[1:])
                counts[StepKey(PHASES[match[1]], shape, shape)] += 1
                cold += 1
            elif match := WARMUP.search(line):
                prepared[PHASES[match[1].lower()]][tuple(int(number) for number in match.groups()[1:])] = None
            if len(counts) + len(prepared["prompt"]) + len(prepared["decode"]) > MAX_SHAPES:
                raise InputError(f"{path}: names more than {MAX_SHAPES} shapes, which no server prepares")
        if not counts and not any(prepared.values()):
            raise InputError(f"{path}: no line tells of a bucket: none missing, and none warmed up")
        notes = [f"{cold} steps ran in buckets that were in the list and not warmed up"] if cold else []
        if not counts:
            notes.append("no step was without a prepared bucket")
        return StepHistogram(
            ("batch", "query", "blocks"),
            counts,
            counted="misses",
            prepared={phase: tuple(shapes) for phase, shapes in prepared.items() if shapes},
            notes=tuple(notes),
        )
