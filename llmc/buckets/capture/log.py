"""Warm-up log lines in the Gaudi guide's form, and the outcome as JSON.

    [Warmup][Prompt][1/24] batch_size:4 seq_len:1024 free_mem:79.16 GiB           before a bucket runs
    [Warmup][Graph/Decode][1/48] batch_size:4 seq_len:128 free_mem:47.51 GiB      before a bucket is captured
    [Warmup][Prompt][1/36] batch_size:4 query_len:1024 num_blocks:2 free_mem:…    where prompts have a context
    Model profiling run took 504 MiB of device memory (15.46 GiB/94.62 GiB used)  a startup step
    Graph/Prompt captured:15 (62.5%) used_mem:14.03 GiB buckets:[(1, 128), …]

`free_mem` is the free memory before the bucket. Prompt blocks are counted per sequence and decode blocks over all
sequences, as in vllm-gaudi since 2025.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmc.buckets.bucket import Bucket
from llmc.buckets.capture.graphs import Attempt, CaptureResults, PhaseOutcome
from llmc.buckets.capture.options import CaptureOptions
from llmc.buckets.capture.order import length
from llmc.buckets.capture.predict import SizeOf
from llmc.buckets.render.text import size_text


@dataclass(frozen=True)
class CaptureLog:
    """Log lines for one plan; with `blocks`, contexts are counted in blocks of `block_size` tokens."""

    block_size: int
    blocks: bool

    @classmethod
    def of(cls, buckets: Iterable[Bucket], block_size: int) -> CaptureLog:
        """Create the lines for `buckets`; contexts are counted in blocks where a prompt bucket has a context."""
        return cls(block_size, any(bucket.phase == "prompt" and bucket.context for bucket in buckets))

    def run(self, bucket: Bucket, number: int, of: int, free: int | None) -> str:
        """Return the line for a `bucket`, the `number`th of its phase, about to run; `free` is None if unknown."""
        return self._line(bucket.phase.capitalize(), bucket, number, of, free)

    def captured(self, attempt: Attempt) -> str:
        """Return the line for a graph about to be captured."""
        phase = f"Graph/{attempt.bucket.phase.capitalize()}"
        return self._line(phase, attempt.bucket, attempt.number, attempt.of, attempt.free)

    def summary(self, outcome: PhaseOutcome) -> str:
        """Return the summary of one phase's captured graphs."""
        shapes = ", ".join(str(self.shape(graph.bucket)) for graph in sorted(outcome.captured, key=lambda g: g.bucket))
        return (
            f"Graph/{outcome.phase.capitalize()} captured:{len(outcome.captured)} ({outcome.percent:.1f}%) "
            f"used_mem:{size_text(outcome.used)} buckets:[{shapes}]"
        )

    def shape(self, bucket: Bucket) -> tuple[int, ...]:
        """Return the numbers that identify a bucket: (batch, sequence length), or (batch, query, blocks)."""
        if self.blocks:
            return bucket.batch, bucket.query, self._blocks(bucket)
        return bucket.batch, length(bucket)

    def _blocks(self, bucket: Bucket) -> int:
        each = -(-bucket.context // self.block_size)
        return each if bucket.phase == "prompt" else bucket.batch * each

    def _line(self, phase: str, bucket: Bucket, number: int, of: int, free: int | None) -> str:
        _, *sizes = self.shape(bucket)
        names = ("query_len", "num_blocks") if self.blocks else ("seq_len",)
        lengths = " ".join(f"{name}:{size}" for name, size in zip(names, sizes, strict=True))
        memory = "unknown" if free is None else size_text(free)
        return f"[Warmup][{phase}][{number}/{of}] batch_size:{bucket.batch} {lengths} free_mem:{memory}"


def took_line(what: str, took: int, used: int, total: int) -> str:
    """Return the line for a startup step: the bytes that it took, and all bytes used so far."""
    return f"{what} took {size_text(took)} of device memory ({size_text(used)}/{size_text(total)} used)"


def budget_line(outcome: CaptureResults, options: CaptureOptions, graphs: str = "graphs") -> str:
    """Return the line with the graph budget and the phases' shares; `graphs` is the device's name for graphs."""
    shares = " and ".join(f"{size_text(phase.share)} for {phase.phase}" for phase in outcome.phases)
    return (
        f"Using {size_text(outcome.budget)}/{size_text(outcome.free)} of free device memory for {graphs}, {shares} "
        f"(VLLM_GRAPH_PROMPT_RATIO={options.graph_prompt_ratio:g})"
    )


def hold_none(outcome: CaptureResults, buckets: Iterable[Bucket], size_of: SizeOf) -> str:
    """Return the message for the case that graphs of `buckets` were requested and none was captured."""
    if outcome.notes:
        return f"no graph was captured: {outcome.notes[0]}"
    least = min(buckets, key=size_of)
    return (
        f"no graph fits in {size_text(outcome.budget)}: the smallest, {least}, takes about "
        f"{size_text(size_of(least))}; raise --graph-reserved-mem or --gpu-memory-utilization, or run without "
        "graphs (--graph-reserved-mem 0)"
    )


def uncaptured_lines(outcome: CaptureResults, lines: CaptureLog, shown: int | None = None) -> list[str]:
    """Return a line with the reason for each bucket without a graph, at most `shown` per phase; None means all."""
    found = []
    for phase in outcome.phases:
        some = phase.uncaptured[:shown]
        found += [f"runs uncaptured: {one.bucket.phase} {lines.shape(one.bucket)}, {one.why}" for one in some]
        if more := len(phase.uncaptured) - len(some):
            found.append(f"runs uncaptured: {more} more {phase.phase} buckets")
    return found


def to_dict(outcome: CaptureResults) -> dict[str, object]:
    """Return the outcome as a JSON object; buckets are [batch, query, context] in tokens."""
    return {
        "free": outcome.free,
        "budget": outcome.budget,
        "used": outcome.used,
        "notes": list(outcome.notes),
        **{phase.phase: _phase(phase) for phase in outcome.phases},
    }


def _phase(outcome: PhaseOutcome) -> dict[str, object]:
    return {
        "share": outcome.share,
        "used": outcome.used,
        "buckets": outcome.candidates,
        "percent": outcome.percent,
        "captured": [
            {"bucket": list(one.bucket.shape), "bytes": one.size, "predicted": one.predicted}
            for one in outcome.captured
        ],
        "uncaptured": [{"bucket": list(one.bucket.shape), "why": one.why} for one in outcome.uncaptured],
    }
