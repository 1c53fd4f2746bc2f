"""The ranges of a plan: every number from a flag, then the environment, then the strategy's default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmc.buckets.bucket import Phase
from llmc.buckets.limits import Limits
from llmc.buckets.strategies.base import DIMENSIONS, Dimension, Range, Strategy, phase_of
from llmc.errors import InputError
from llmc.settings import BOUNDS, PARAMETERS, Settings

GAP = ("powers-of-two-tpu", "prompt_query", "step")
"""The strategy, dimension and number that VLLM_TPU_BUCKET_PADDING_GAP sets."""

CAPTURED = "max_seq_len_to_capture"
LENGTHS = ("prompt_query", "decode_context")
"""The dimensions whose default max is lowered by `CAPTURED`."""


@dataclass
class Ranges:
    """The range of every dimension, the origin of each number ("prompt_batch.max" → "flag" …), and warnings."""

    values: dict[Dimension, Range] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def resolve(
    limits: Limits,
    flags: Mapping[Dimension, Range | None],
    rules: Mapping[Phase, tuple[str, Strategy]],
    settings: Settings,
    captured: int | None = None,
) -> Ranges:
    """Return the ranges for `rules` (phase → name and strategy).

    A flag gives min, step and max of its dimension, and may give the rule's other numbers. The environment gives single
    numbers; those in blocks are converted to tokens here. A default min is lowered to a lower max. Missing numbers get
    the rule's default, computed from the other numbers where the rule requires it. `captured`, or the variable for it,
    is a default max of the lengths in tokens.

    A variable that a flag overrides, or that the rule does not use, leaves a warning. Raises InputError, naming the
    source of the numbers, for an invalid range, one that starts at 0 sequences or 0 new tokens, or one with a number
    unknown to its rule.
    """
    found = Ranges()
    for dimension in DIMENSIONS:
        name, rule = rules[phase_of(dimension)]
        flag = flags.get(dimension)
        if dimension.endswith("_context") and not limits.contexts:
            _leave_contexts(found, dimension, settings, flag)
            continue
        if flag is not None:
            bounds, given = flag, dict.fromkeys(flag.numbers(), "flag")
            _warn_overruled(found, dimension, settings, flag)
        else:
            bounds, given = _from_environment(found, dimension, limits, name, rule, settings, captured)
        unknown = [number for number in given if number not in rule.parameters and number not in BOUNDS]
        if unknown:
            raise InputError(f"{bounds}: the {name} strategy has no {' and no '.join(unknown)}; leave it out")
        if bounds.min == 0 and not dimension.endswith("_context"):
            what = "sequences" if dimension.endswith("_batch") else "new tokens"
            raise InputError(f"{bounds}: no step has 0 {what}; raise min to at least 1")
        found.values[dimension] = rule.complete(dimension, bounds, limits)
        numbers = found.values[dimension].numbers()
        found.origins |= {f"{dimension}.{number}": given.get(number, "default") for number in numbers}
    gap = settings.tpu_padding_gap
    if gap is not None and f"environment {gap.variable}" not in found.origins.values():
        found.warnings.append(
            f"{gap.variable} has no effect: it only sets the step of --prompt-seq for powers-of-two-tpu"
        )
    return found


def _leave_contexts(found: Ranges, dimension: Dimension, settings: Settings, flag: Range | None) -> None:
    """Set only context 0, regardless of the given range: the graphs read no cached tokens."""
    requested = [] if flag is None else [flag.source]
    requested += [number.variable for (known, _), number in settings.bucket_numbers.items() if known == dimension]
    found.warnings += [
        f"{source} has no effect: the model has only recurrent state, so contexts are 0" for source in requested
    ]
    found.values[dimension] = Range(0, 1, 0)
    found.origins |= {f"{dimension}.{number}": "model config" for number in BOUNDS}


def _warn_overruled(found: Ranges, dimension: Dimension, settings: Settings, flag: Range) -> None:
    for (known, _), number in settings.bucket_numbers.items():
        if known == dimension:
            found.warnings.append(f"{number.variable} has no effect: {flag.source} is given")


def _from_environment(
    found: Ranges,
    dimension: Dimension,
    limits: Limits,
    name: str,
    rule: Strategy,
    settings: Settings,
    captured: int | None,
) -> tuple[Range, dict[str, str]]:
    default = rule.defaults(limits)[dimension]
    numbers: dict[str, int] = {bound: getattr(default, bound) for bound in BOUNDS}
    variables: dict[str, str] = {}
    for parameter in PARAMETERS:
        number = settings.bucket_numbers.get((dimension, parameter))
        if number is None and (name, dimension, parameter) == GAP:
            number = settings.tpu_padding_gap
        if number is None:
            continue
        if parameter not in rule.parameters:
            found.warnings.append(f"{number.variable} has no effect: the {name} strategy has no {parameter}")
            continue
        numbers[parameter] = number.in_tokens(limits.block_size)
        if dimension == "decode_context" and number.blocks and numbers[parameter] > limits.max_model_len:
            found.warnings.append(
                f"{number.variable}={number.value} counts the blocks of one sequence, which exceed "
                f"max_model_len {limits.max_model_len}; the vendor's planner counts those of the whole batch: divide "
                "by max_num_seqs"
            )
        variables[parameter] = number.variable
    origins = {parameter: f"environment {variable}" for parameter, variable in variables.items()}
    if dimension in LENGTHS and "max" not in variables:
        variable = settings.limit_numbers.get(CAPTURED)
        most = captured if captured is not None else variable.value if variable else None
        if most is not None and most < numbers["max"]:
            numbers["max"] = most
            origins["max"] = "flag" if captured is not None or variable is None else f"environment {variable.variable}"
    if not origins:
        return default, {}
    if "min" not in variables and numbers["max"] >= 0:
        numbers["min"] = min(numbers["min"], numbers["max"])
    source = dimension.replace("_", " ")
    if variables:
        source += f" (from {', '.join(variables.values())})"
    return Range(source=source, **numbers), origins
