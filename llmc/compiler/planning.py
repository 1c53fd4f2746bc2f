"""From a checkpoint's configuration and the user's numbers to a plan."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.planner import make_plan
from llmc.buckets.strategies.base import Range
from llmc.compiler.checkpoint import read_config
from llmc.errors import InputError
from llmc.settings import Settings


def plan_for(
    model: str | None,
    *,
    strategy: str | None = None,
    max_model_len: int | None = None,
    max_prompt_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    block_size: int | None = None,
    prompt_batch: Range | Sequence[int] | None = None,
    prompt_seq: Range | Sequence[int] | None = None,
    prompt_context: Range | Sequence[int] | None = None,
    decode_batch: Range | Sequence[int] | None = None,
    decode_seq: Range | Sequence[int] | None = None,
    settings: Settings | None = None,
) -> Plan:
    """The plan for a checkpoint or config.json (`model`), or for `max_model_len` alone; None leaves a default.

    `settings` defaults to the environment. Raises InputError for numbers that cannot be used, a length that the
    model's positions do not reach, or no length at all; CheckpointError when the model cannot be read.
    """
    length, origin = _model_length(max_model_len, model)
    given = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": block_size,
        "max_prompt_len": max_prompt_len,
    }
    limits = Limits(length, **{name: value for name, value in given.items() if value is not None})
    origins = {name: "default" if given.get(name) is None else "flag" for name in limits.to_dict()}
    return make_plan(
        limits,
        strategy,
        prompt_batch=_range("prompt_batch", prompt_batch),
        prompt_query=_range("prompt_seq", prompt_seq),
        prompt_context=_range("prompt_context", prompt_context),
        decode_batch=_range("decode_batch", decode_batch),
        decode_context=_range("decode_seq", decode_seq),
        settings=settings if settings is not None else Settings.from_environment(),
        limit_origins=origins | {"max_model_len": origin},
    )


def _range(name: str, value: Range | Sequence[int] | None) -> Range | None:
    if value is None or isinstance(value, Range):
        return value
    if len(value) != 3:
        raise InputError(f"{name} {value!r} is not (min, step, max)")
    low, step, high = value
    return Range(low, step, high, name)


def _model_length(flag: int | None, source: str | None) -> tuple[int, str]:
    """max_model_len and its origin, from the flag or the config, held against what the config allows."""
    if source is None:
        if flag is None:
            raise InputError("nothing to plan for: give MODEL, --config FILE or --max-model-len N")
        return flag, "flag"
    config = read_config(source)
    positions = config.get("max_position_embeddings")
    if type(positions) is not int or positions < 1:
        if flag is None:
            raise InputError(f"{source}: its config has no max_position_embeddings; give --max-model-len N")
        return flag, "flag"
    if flag is None:
        return positions, "model config"
    longest = int(positions * _rope_factor(config))
    if flag > longest:
        raise InputError(f"--max-model-len {flag} is above the {longest} positions of {source}; lower it")
    return flag, "flag"


def _rope_factor(config: dict[str, object]) -> float:
    """How far rotary scaling stretches max_position_embeddings, for the kinds not counted in it already."""
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_type") in ("linear", "dynamic", "yarn"):
        factor = rope.get("factor")
        if isinstance(factor, int | float):
            return max(1.0, float(factor))
    return 1.0
