"""The ranges of a plan: every number from a flag, else the environment, else the strategy's default."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.buckets.limits import Limits
from llmc.buckets.strategies.base import DIMENSIONS, Dimension, Range
from llmc.errors import InputError
from llmc.settings import BOUNDS, Settings


def resolve(
    limits: Limits,
    flags: Mapping[Dimension, Range | None],
    defaults: Mapping[Dimension, Range],
    settings: Settings,
) -> tuple[dict[Dimension, Range], dict[str, str]]:
    """The range of every dimension, and the origin of each of its numbers ("prompt_batch.max" → "flag" …).

    A flag gives all three numbers of its dimension; the environment gives single numbers, those in blocks
    converted to tokens here. A default min gives way to a lower max. Raises InputError, naming where the
    numbers come from, for a range that is none, or that starts at 0 sequences or 0 new tokens.
    """
    ranges: dict[Dimension, Range] = {}
    origins: dict[str, str] = {}
    for dimension in DIMENSIONS:
        flag = flags.get(dimension)
        if flag is not None:
            ranges[dimension] = flag
            origins |= {f"{dimension}.{bound}": "flag" for bound in BOUNDS}
        else:
            bounds, sources = _from_environment(dimension, limits, defaults[dimension], settings)
            ranges[dimension] = bounds
            origins |= {f"{dimension}.{bound}": sources.get(bound, "default") for bound in BOUNDS}
        if ranges[dimension].min == 0 and not dimension.endswith("_context"):
            what = "sequences" if dimension.endswith("_batch") else "new tokens"
            raise InputError(f"{ranges[dimension]}: no step has 0 {what}; raise min to at least 1")
    return ranges, origins


def _from_environment(
    dimension: Dimension, limits: Limits, default: Range, settings: Settings
) -> tuple[Range, dict[str, str]]:
    numbers = {"min": default.min, "step": default.step, "max": default.max}
    variables: dict[str, str] = {}
    for bound in BOUNDS:
        number = settings.bucket_numbers.get((dimension, bound))
        if number is not None:
            numbers[bound] = number.in_tokens(limits.block_size)
            variables[bound] = number.variable
    if "min" not in variables and numbers["max"] >= 0:
        numbers["min"] = min(numbers["min"], numbers["max"])
    source = dimension.replace("_", " ")
    if variables:
        source = f"{source} (from {', '.join(variables.values())})"
    bounds = Range(numbers["min"], numbers["step"], numbers["max"], source)
    return bounds, {bound: f"environment {variable}" for bound, variable in variables.items()}
