"""Evaluations as plain text: one plan in detail, and several against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmc.buckets.bucket import Bucket
from llmc.buckets.evaluation import Evaluation, PhaseEvaluation
from llmc.buckets.text_table import percent, table

SHOWN_DEAD = 8
"""Buckets that were never used which the text lists; of a longer list the first ones and the last."""

USE_HEADER = ("bucket", "steps", "rows", "waste", "share")
COMPARISON_HEADER = ("plan", "phase", "graphs", "steps", "waste", "p50", "p95", "p99", "dead", "seconds")


def text(evaluation: Evaluation, *, hottest: int = 8) -> str:
    """The report on one plan: totals, the `hottest` buckets and those never used, by phase; ends in a newline."""
    sections = [_section(phase, hottest) for phase in (evaluation.prompt, evaluation.decode)]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def comparison_text(evaluations: Sequence[tuple[str, Evaluation]]) -> str:
    """One table with a row for each plan and phase; ends in a newline.

    The column of seconds is there when any plan has them. What a plan does not cover follows the table, since the
    waste of its row leaves that out.
    """
    rows: list[tuple[str, ...]] = [COMPARISON_HEADER]
    uncovered = []
    for name, evaluation in evaluations:
        for phase in (evaluation.prompt, evaluation.decode):
            rows.append(_comparison_row(name, phase))
            if phase.uncovered:
                uncovered.append(f"{name}: {_uncovered(phase)}")
    if not any(row[-1] for row in rows[1:]):
        return "\n".join([*table([row[:-1] for row in rows], range(2, 9)), *uncovered]) + "\n"
    return "\n".join([*table(rows, range(2, 10)), *uncovered]) + "\n"


def range_text(name: str, evaluation: Evaluation, wastes: Mapping[str, tuple[float, float]]) -> str:
    """How sure the waste is of traffic whose lengths are known by interval; ends in a newline."""
    lines = []
    for phase in (evaluation.prompt, evaluation.decode):
        if phase.phase in wastes:
            low, high = wastes[phase.phase]
            what = f"{name}: {phase.phase}" if name else phase.phase
            lines.append(f"{what} waste {percent(phase.waste)} ({percent(low)} to {percent(high)})")
    return "\n".join([*lines, "the range: all lengths at the low or at the high end of their intervals"]) + "\n"


def _comparison_row(name: str, phase: PhaseEvaluation) -> tuple[str, ...]:
    wastes = (phase.waste, phase.waste_p50, phase.waste_p95, phase.waste_p99)
    return (
        name,
        phase.phase,
        str(len(phase.buckets)),
        str(phase.steps),
        *(percent(waste) for waste in wastes),
        str(len(phase.dead)),
        "" if phase.seconds is None else f"{phase.seconds:.1f}",
    )


def _section(phase: PhaseEvaluation, hottest: int) -> list[str]:
    lines = [f"{phase.phase}: {phase.requests} requests in {phase.steps} steps"]
    if phase.uncovered:
        lines.append(_uncovered(phase))
    if phase.steps:
        lines.append(
            f"waste {percent(phase.waste)} (steps: p50 {percent(phase.waste_p50)}, p95 {percent(phase.waste_p95)}, "
            f"p99 {percent(phase.waste_p99)}), {phase.real_tokens} tokens padded to {phase.padded_tokens}"
        )
        if phase.ragged_waste:
            lines.append(f"of it {percent(phase.ragged_waste)} by unequal lengths in one step, which no bucket avoids")
        if phase.seconds is not None:
            lines.append(f"{phase.seconds:.1f} s by the bench")
    used = phase.hottest(hottest)
    if used:
        rows = [
            (shape(use.bucket), str(use.steps), str(use.requests), percent(use.waste), percent(use.share))
            for use in used
        ]
        lines += ["", *table([USE_HEADER, *rows], range(1, 5)), ""]
    dead = phase.dead
    lines.append(f"never used: {len(dead)} of {len(phase.buckets)} buckets{': ' if dead else ''}{_shapes(dead)}")
    return lines


def _uncovered(phase: PhaseEvaluation) -> str:
    what = "request" if phase.phase == "prompt" else "step"
    return (
        f"{phase.uncovered} {phase.phase} {what}{'' if phase.uncovered == 1 else 's'} covered by no bucket: plan anew"
    )


def _shapes(buckets: Sequence[Bucket]) -> str:
    shown = [shape(bucket) for bucket in buckets]
    if len(shown) > SHOWN_DEAD:
        shown = [*shown[: SHOWN_DEAD - 2], "…", shown[-1]]
    return " ".join(shown)


def shape(bucket: Bucket) -> str:
    """A bucket without its phase: "4x512+0"."""
    return f"{bucket.batch}x{bucket.query}+{bucket.context}"
