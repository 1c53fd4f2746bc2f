"""The lines that a warm-up logs, in the guide's form, and its outcome as JSON.

    [Warmup][Prompt][1/24] batch_size:4 seq_len:1024 free_mem:79.16 GiB           a bucket that is run
    [Warmup][Graph/Decode][1/48] batch_size:4 seq_len:128 free_mem:47.51 GiB      a bucket that is captured
    [Warmup][Prompt][1/36] batch_size:4 query_len:1024 num_blocks:2 free_mem:…    where prompts have a context
    Model profiling run took 504 MiB of device memory (15.46 GiB/94.62 GiB used)  a step of the start
    Graph/Prompt captured:15 (62.5%) used_mem:14.03 GiB buckets:[(1, 128), …]

`free_mem` is before the bucket. A prompt's blocks are those of one sequence, a decode step's those of all, as
vllm-gaudi counts them since 2025.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmc.buckets.bucket import Bucket
from llmc.buckets.capture.graphs import Attempt, Outcome, PhaseOutcome
from llmc.buckets.capture.options import CaptureOptions
from llmc.buckets.capture.order import length
from llmc.buckets.capture.predict import SizeOf
from llmc.buckets.render.text import size_text


@dataclass(frozen=True)
class Lines:
    """Lines for one plan; `block_size` tokens are a block where `blocks` says that lines count contexts in them."""

    block_size: int
    blocks: bool

    @classmethod
    def of(cls, buckets: Iterable[Bucket], block_size: int) -> Lines:
        """Blocks are named where a prompt bucket has a context, which two numbers cannot tell."""
        return cls(block_size, any(bucket.phase == "prompt" and bucket.context for bucket in buckets))

    def run(self, bucket: Bucket, number: int, of: int, free: int | None) -> str:
        """`bucket`, the `number`th of its phase, is about to be run; None: nobody knows what is free."""
        return self._line(bucket.phase.capitalize(), bucket, number, of, free)

    def captured(self, attempt: Attempt) -> str:
        """A graph is about to be captured."""
        phase = f"Graph/{attempt.bucket.phase.capitalize()}"
        return self._line(phase, attempt.bucket, attempt.number, attempt.of, attempt.free)

    def summary(self, outcome: PhaseOutcome) -> str:
        """What was captured of a phase."""
        shapes = ", ".join(str(self.shape(graph.bucket)) for graph in sorted(outcome.captured, key=lambda g: g.bucket))
        return (
            f"Graph/{outcome.phase.capitalize()} captured:{len(outcome.captured)} ({outcome.percent:.1f}%) "
            f"used_mem:{size_text(outcome.used)} buckets:[{shapes}]"
        )

    def shape(self, bucket: Bucket) -> tuple[int, ...]:
        """The numbers that name a bucket: (batch, sequence length), or (batch, query, blocks)."""
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
    """What a step of the start took, and what all have taken by now; in bytes."""
    return f"{what} took {size_text(took)} of device memory ({size_text(used)}/{size_text(total)} used)"


def budget_line(outcome: Outcome, options: CaptureOptions, graphs: str = "graphs") -> str:
    """The budget and the shares of the phases; `graphs` is what the device calls them."""
    shares = " and ".join(f"{size_text(phase.share)} for {phase.phase}" for phase in outcome.phases)
    return (
        f"Using {size_text(outcome.budget)}/{size_text(outcome.free)} of free device memory for {graphs}, {shares} "
        f"(VLLM_GRAPH_PROMPT_RATIO={options.graph_prompt_ratio:g})"
    )


def hold_none(outcome: Outcome, buckets: Iterable[Bucket], size_of: SizeOf) -> str:
    """What to say where graphs of `buckets` were wanted and there is none."""
    if outcome.notes:
        return f"no graph was captured: {outcome.notes[0]}"
    least = min(buckets, key=size_of)
    return (
        f"{size_text(outcome.budget)} for graphs hold none: the smallest, {least}, takes about "
        f"{size_text(size_of(least))}; raise --graph-reserved-mem or --gpu-memory-utilization, or run without "
        "graphs (--graph-reserved-mem 0)"
    )


def uncaptured_lines(outcome: Outcome, lines: Lines, shown: int | None = None) -> list[str]:
    """A line for each bucket that runs without a graph, with the reason; of each phase the first `shown`, None: all."""
    found = []
    for phase in outcome.phases:
        some = phase.uncaptured[:shown]
        found += [f"runs uncaptured: {one.bucket.phase} {lines.shape(one.bucket)}, {one.why}" for one in some]
        if more := len(phase.uncaptured) - len(some):
            found.append(f"runs uncaptured: {more} more {phase.phase} buckets")
    return found


def to_dict(outcome: Outcome) -> dict[str, object]:
    """The outcome as JSON holds it; buckets are [batch, query, context] in tokens."""
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
