"""The contract of a bucketing strategy, and the ranges it works on.

To add a strategy: one file beside this one with a class that has `defaults` and `values`, and one line in the
registry (`strategies/__init__.py`). Filters, coverage and reporting are the planner's and apply to all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from llmc.buckets.limits import Limits
from llmc.errors import InputError

Dimension = Literal["prompt_batch", "prompt_query", "prompt_context", "decode_batch", "decode_context"]
"""What a plan chooses values for, contexts in tokens per sequence; a decode bucket's query is always 1."""

DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)

MAX_VALUES = 1 << 16
"""Most values one range may span (max / step): beyond it a plan could never be compiled."""


@dataclass(frozen=True)
class Range:
    """Inclusive bounds and the step of one dimension: sequences for a batch, tokens for query and context.

    `source` is where the numbers come from, for messages ("--prompt-batch"); it takes no part in equality.
    Raises InputError, naming `source`, unless 0 ≤ min ≤ max, 1 ≤ step, max / step ≤ MAX_VALUES.
    """

    min: int
    step: int
    max: int
    source: str = field(default="range", compare=False)

    def __post_init__(self) -> None:
        for name in ("min", "step", "max"):
            value = getattr(self, name)
            if type(value) is not int:
                raise InputError(f"{self}: {name} {value!r} is not an integer")
            if value < 0:
                raise InputError(f"{self}: {name} must not be negative")
        if self.step == 0:
            raise InputError(f"{self}: step must be at least 1; for a single value give it as min and max")
        if self.min > self.max:
            raise InputError(f"{self}: min is above max; swap them or raise max to at least {self.min}")
        if self.max // self.step > MAX_VALUES:
            raise InputError(
                f"{self}: spans more than {MAX_VALUES} values; raise step to at least {self.max // MAX_VALUES + 1}"
            )

    def __str__(self) -> str:
        return f"{self.source} {self.min},{self.step},{self.max}"


class Strategy(Protocol):
    """Turns ranges into the values that buckets are made of; one instance serves one plan."""

    def defaults(self, limits: Limits) -> Mapping[Dimension, Range]:
        """The range of every dimension, for numbers that neither a flag nor the environment gives."""
        ...

    def values(self, dimension: Dimension, bounds: Range) -> list[int]:
        """Ascending, distinct values within [bounds.min, bounds.max].

        The values may stop short of bounds.max, and may be none: the planner adds the top that coverage
        needs.
        """
        ...
