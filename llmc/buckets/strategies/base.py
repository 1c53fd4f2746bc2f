"""Interface of a bucketing strategy, and its ranges.

To add a strategy, write a `Strategy` in one file in this folder, and add one line to the registry
(`strategies/__init__.py`). The planner's filters, coverage and reporting apply to every strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, get_args

from llmc.buckets.bucket import Phase
from llmc.buckets.limits import Limits
from llmc.errors import InputError
from llmc.settings import BOUNDS, PARAMETERS

Dimension = Literal["prompt_batch", "prompt_query", "prompt_context", "decode_batch", "decode_context"]
"""The dimensions of a plan, contexts in tokens per sequence; a decode bucket's query is always 1."""

DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)


def phase_of(dimension: Dimension) -> Phase:
    """Return the phase of a dimension."""
    return "prompt" if dimension.startswith("prompt_") else "decode"


MAX_VALUES = 1 << 16
"""Most values one range may span (max / step): beyond it a plan could never be compiled."""


@dataclass(frozen=True)
class Range:
    """Inclusive bounds and the step of one dimension: sequences for a batch, tokens for query and context.

    Three more numbers belong to one rule each, and are None for the others: `limit`, the number of values of the
    exponential rule; `pad_max` (in the dimension's unit, 0 for max) and `pad_percent` (0 to 50), the padding limits of
    the padding-aware rule. `source` is the origin of the numbers, for messages ("--prompt-batch"); equality ignores it.
    A step of 0 with min = max, as in 0,0,0, means that one value, as any step does; the value itself (or 1) becomes the
    step.

    Raises InputError, naming `source`, unless 0 ≤ min ≤ max, 1 ≤ step, max / step ≤ MAX_VALUES, 1 ≤ limit ≤ MAX_VALUES,
    0 ≤ pad_max, 0 ≤ pad_percent ≤ 50.
    """

    min: int
    step: int
    max: int
    source: str = field(default="range", compare=False)
    limit: int | None = None
    pad_max: int | None = None
    pad_percent: int | None = None

    def __post_init__(self) -> None:
        for name in PARAMETERS:
            value = getattr(self, name)
            if value is None and name not in BOUNDS:
                continue
            if type(value) is not int:
                raise InputError(f"{self}: {name} {value!r} is not an integer")
            if value < 0:
                raise InputError(f"{self}: {name} must not be negative")
        if self.step == 0 and self.min == self.max:
            object.__setattr__(self, "step", self.max or 1)
        if self.step == 0:
            raise InputError(f"{self}: step must be at least 1; for a single value give it as min and max")
        if self.min > self.max:
            raise InputError(f"{self}: min is above max; swap them or raise max to at least {self.min}")
        if self.max // self.step > MAX_VALUES:
            raise InputError(
                f"{self}: spans more than {MAX_VALUES} values; raise step to at least {self.max // MAX_VALUES + 1}"
            )
        if self.limit is not None and not 1 <= self.limit <= MAX_VALUES:
            raise InputError(f"{self}: limit {self.limit} must be 1 to {MAX_VALUES}, the number of values")
        if self.pad_percent is not None and self.pad_percent > 50:
            raise InputError(f"{self}: pad_percent {self.pad_percent} must be 0 to 50")

    @classmethod
    def of(cls, source: str, numbers: Sequence[int]) -> Range:
        """Create a range from (min, step, max), optionally followed by one rule's numbers: limit, or pad_max and
        pad_percent.

        Raises InputError, naming `source`, for another count of numbers.
        """
        extra: tuple[str, ...] | None = {3: (), 4: ("limit",), 5: ("pad_max", "pad_percent")}.get(len(numbers))
        if extra is None:
            given = ",".join(map(str, numbers))
            raise InputError(
                f"{source} {given!r} is not MIN,STEP,MAX, three whole numbers such as 1,32,64 (exponential: also "
                "MIN,STEP,MAX,LIMIT; padding-aware: also MIN,STEP,MAX,PAD_MAX,PAD_PERCENT)"
            )
        rest: dict[str, int] = dict(zip(extra, numbers[3:], strict=True))
        low, step, high = numbers[:3]
        limit, pad_max, pad_percent = (rest.get(name) for name in PARAMETERS[3:])
        return cls(low, step, high, source, limit, pad_max, pad_percent)

    def in_tokens(self, block_size: int) -> Range:
        """Return the same range of contexts, converted from blocks of `block_size` tokens."""
        scaled = {name: getattr(self, name) * block_size for name in (*BOUNDS, "pad_max") if name in self.numbers()}
        return replace(self, **scaled)

    def numbers(self) -> dict[str, int]:
        """Return the numbers that are set, by name, in the order of `PARAMETERS`."""
        return {name: getattr(self, name) for name in PARAMETERS if getattr(self, name) is not None}

    def __str__(self) -> str:
        return f"{self.source} {','.join(str(getattr(self, name)) for name in BOUNDS)}"


class Strategy(ABC):
    """Turns ranges into bucket values; one instance serves one plan."""

    parameters: ClassVar[tuple[str, ...]] = BOUNDS
    """The numbers of a range that the rule uses, of `PARAMETERS`; setting another has no effect."""

    @abstractmethod
    def defaults(self, limits: Limits) -> Mapping[Dimension, Range]:
        """Return the range of every dimension, for numbers that neither a flag nor the environment gives."""

    def complete(self, dimension: Dimension, bounds: Range, limits: Limits) -> Range:
        """Return `bounds` with the rule's own numbers filled in where they are None."""
        return bounds

    @abstractmethod
    def values(self, dimension: Dimension, bounds: Range) -> list[int]:
        """Return ascending, distinct values within [bounds.min, bounds.max].

        The values may stop short of bounds.max, and may be empty: the planner adds the top that coverage needs.
        """
