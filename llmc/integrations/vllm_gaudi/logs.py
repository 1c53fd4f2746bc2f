"""Bucket logs of vLLM on Gaudi: buckets generated and warmed up at start, and misses during serving.

vllm-gaudi, 2025 and 2026:
    INFO … Generated 36 prompt buckets [bs, query, num_blocks]: [(1, 128, 0), …]
HabanaAI's fork, 2024:
    INFO … Generated 31 prompt buckets [bs, seq]: [(1, 128), …]
    INFO … Generated 112 decode buckets [bs, total_blocks]: [(1, 128), …]
    INFO … [Warmup][Graph/prompt][1/36] batch_size:4 query_len:1024 num_blocks:0 free_mem:21.06 GiB
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from llmc.buckets.traffic.formats.base import Head, StepFormat
from llmc.buckets.traffic.step_histogram import StepHistogram, StepKey, StepPhase
from llmc.errors import InputError
from llmc.integrations.base import Lists, Shape
from llmc.integrations.vllm_gaudi.config import DECODE, PROMPT

_TRIPLE = r"\((\d{1,9}), (\d{1,9}), (\d{1,9})\)"
MISSING = re.compile(rf"\b(Prompt|Decode) bucket for {_TRIPLE} was not prepared\. Adding new bucket:? {_TRIPLE}")
COLD = re.compile(r"Configuration: \('?(prompt|decode)'?, (\d{1,9}), (\d{1,9}), (\d{1,9})\) was not warmed-up!")
WARMUP = re.compile(
    r"\[Warmup\]\[[^\]]*(prompt|decode)[^\]]*\]\[\d+/\d+\] "
    r"batch_size:(\d{1,9}) query_len:(\d{1,9}) num_blocks:(\d{1,9})\b",
    re.I,
)
PHASES: dict[str, StepPhase] = {"prompt": "prompt", "decode": "decode"}

MAX_SHAPES = 100_000
"""Most distinct shapes kept; a server prepares at most a few thousand."""


class VllmGaudiLog(StepFormat):
    """Steps of (batch, query, blocks) that no prepared bucket covered, and the bucket that was added for each.

    An added bucket also serves later steps, so each miss means one compilation, not one per step of its shape. "was not
    warmed-up" names a listed bucket that was compiled during serving. Warm-up lines list prepared buckets.
    """

    name = "vllm-gaudi"
    title = "vLLM on Gaudi's log of buckets"
    source = "vllm-gaudi 000dfe0, extension/bucketing/common.py, and its v1/worker/hpu_model_runner.py"
    tried = 3

    def recognises(self, head: Head) -> bool:
        return any(known.search(head.text) is not None for known in (MISSING, COLD, WARMUP))

    def steps(self, path: str, lines: Iterator[str]) -> StepHistogram:
        """Return the misses, and the warmed-up buckets."""
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
            raise InputError(f"{path}: no line reports a bucket, neither a missing nor a warmed-up one")
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


_GENERATED = re.compile(r"Generated (\d{1,9}) (prompt|decode) buckets \[([a-z_, ]+)\]: \[(.*)")
_TUPLE = re.compile(r"\((\d{1,9}(?:, ?\d{1,9})*)\)")


def start_lists(lines: Iterable[str]) -> Lists | None:
    """Return the lists in `lines` of a log, or None where a family has none.

    Raises InputError for an incomplete printed list.
    """
    generated: dict[str, tuple[Shape, ...]] = {}
    warmed: dict[str, set[Shape]] = {}
    for number, line in enumerate(lines, 1):
        if match := _GENERATED.search(line):
            generated[match[2]] = _generated(match, number)
        elif match := WARMUP.search(line):
            warmed.setdefault(match[1].lower(), set()).add((int(match[2]), int(match[3]), int(match[4])))
    found = {family: generated.get(family) or tuple(sorted(warmed.get(family, ()))) for family in (PROMPT, DECODE)}
    return found if all(found.values()) else None


def _generated(match: re.Match[str], number: int) -> tuple[Shape, ...]:
    count, family, names = int(match[1]), match[2], [name.strip() for name in match[3].split(",")]
    rows = [tuple(map(int, row.split(","))) for row in _TUPLE.findall(match[4])]
    if len(rows) != count or any(len(row) != len(names) for row in rows):
        raise InputError(f"line {number}: {count} {family} buckets were generated, but the line lists {len(rows)} of "
                         f"{', '.join(names)}; give the whole line")  # fmt: skip
    if len(names) == 3:
        return tuple(sorted(set(rows)))
    if family == PROMPT:
        return tuple(sorted({(batch, query, 0) for batch, query in rows}))
    return tuple(sorted({(batch, 1, blocks) for batch, blocks in rows}))
