"""What `llmc cache gc` would take: under some limits, and in which order. Nothing is removed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from llmc.artifacts.gc.collect import GRACE_SECONDS
from llmc.artifacts.gc.gc_policy import Limits, Stage, decide, size_of, stages
from llmc.artifacts.overview.survey import Survey
from llmc.artifacts.store.publish_lock import is_of_one_machine
from llmc.buckets.warmup.sizes import UNITS
from llmc.paths import is_dir

DAYS = (90, 30, 7, 1)
SIZES = 4
"""Sizes that are tried: powers of two below that of the store, the largest first."""


class Freed(NamedTuple):
    """What a limit takes: results, bytes given back, and bytes left in the store; `kept`: results by why they stay."""

    limit: str
    items: int
    freed: int
    left: int
    kept: str


def by_limit(survey: Survey) -> list[Freed]:
    """What `llmc cache gc` would take without a limit, and under some of each kind."""
    found = []
    for limit, max_size, max_age in _tried(size_of(survey.inventory)):
        plan = decide(survey.inventory, _limits(survey, max_size, max_age))
        kept = ", ".join(f"{count} {why}" for why, count in sorted(plan.kept.items()))
        found.append(Freed(limit, len(plan.items), plan.freed, plan.size, kept))
    return found


def in_order(survey: Survey) -> list[Stage]:
    """What a limit on the size takes first, second … until nothing is left that may go."""
    return stages(survey.inventory, _limits(survey, None, None))


def _tried(size: int) -> Iterator[tuple[str, int | None, float | None]]:
    yield "", None, None
    for days in DAYS:
        yield f"--max-age {days}d", None, days * 86400.0
    for power in range(SIZES):
        exponent = max(0, size - 1).bit_length() - 1 - power
        unit = min(exponent // 10, len(UNITS) - 1)
        if exponent >= 0:
            yield f"--max-size {1 << exponent - 10 * unit}{UNITS[unit]}", 1 << exponent, None


def _limits(survey: Survey, max_size: int | None, max_age: float | None) -> Limits:
    alone = is_dir(survey.layout.base) and is_of_one_machine(survey.layout)
    return Limits(max_size, max_age, GRACE_SECONDS, survey.now, alone)
