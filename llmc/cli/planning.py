"""The planning flags, which every command that plans shares, and the plan they ask for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import typer

from llmc.buckets.limits import DEFAULT_BLOCK_SIZE, DEFAULT_MAX_NUM_SEQS, Limits
from llmc.buckets.plan import Plan
from llmc.buckets.planner import make_plan
from llmc.buckets.strategies import DEFAULT_STRATEGY, names
from llmc.buckets.strategies.base import Range
from llmc.errors import InputError
from llmc.settings import Settings

_PANEL = "Planning"
_RANGE = "MIN,STEP,MAX"

StrategyFlag = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="NAME",
        help=f"How to choose values: {', '.join(names())}. Default: {DEFAULT_STRATEGY}.",
        rich_help_panel=_PANEL,
    ),
]
MaxModelLenFlag = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        metavar="N",
        help="Tokens of one sequence, prompt and answer. Default: what the model config says.",
        rich_help_panel=_PANEL,
    ),
]
MaxPromptLenFlag = Annotated[
    int | None,
    typer.Option(
        "--max-prompt-len",
        metavar="N",
        help="Tokens of the longest prompt. Default: max-model-len - 1.",
        rich_help_panel=_PANEL,
    ),
]
MaxNumSeqsFlag = Annotated[
    int | None,
    typer.Option(
        "--max-num-seqs",
        metavar="N",
        help=f"Sequences in flight. Default: {DEFAULT_MAX_NUM_SEQS}.",
        rich_help_panel=_PANEL,
    ),
]
MaxNumBatchedTokensFlag = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens",
        metavar="N",
        help="Padded new tokens of one prompt step. Default: no limit.",
        rich_help_panel=_PANEL,
    ),
]
BlockSizeFlag = Annotated[
    int | None,
    typer.Option(
        "--block-size",
        metavar="N",
        help=f"Tokens of one KV cache block. Default: {DEFAULT_BLOCK_SIZE}.",
        rich_help_panel=_PANEL,
    ),
]
PromptBatchFlag = Annotated[
    str | None,
    typer.Option(
        "--prompt-batch", metavar=_RANGE, help="Prompts of one prompt step.", rich_help_panel=_PANEL
    ),
]
PromptSeqFlag = Annotated[
    str | None,
    typer.Option(
        "--prompt-seq", metavar=_RANGE, help="New tokens of each prompt in a step.", rich_help_panel=_PANEL
    ),
]
PromptContextFlag = Annotated[
    str | None,
    typer.Option(
        "--prompt-context",
        metavar=_RANGE,
        help="Cached tokens before them, for chunked prompts and reused prefixes. Default: 0 alone.",
        rich_help_panel=_PANEL,
    ),
]
DecodeBatchFlag = Annotated[
    str | None,
    typer.Option(
        "--decode-batch", metavar=_RANGE, help="Sequences of one decode step.", rich_help_panel=_PANEL
    ),
]
DecodeSeqFlag = Annotated[
    str | None,
    typer.Option(
        "--decode-seq", metavar=_RANGE, help="Cached tokens of each of them.", rich_help_panel=_PANEL
    ),
]


@dataclass(frozen=True)
class PlanningFlags:
    """The planning flags as typed; None is a flag that was not given. Ranges are "MIN,STEP,MAX"."""

    strategy: str | None = None
    max_model_len: int | None = None
    max_prompt_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    prompt_batch: str | None = None
    prompt_seq: str | None = None
    prompt_context: str | None = None
    decode_batch: str | None = None
    decode_seq: str | None = None

    def given(self) -> list[str]:
        """The flags that were given, spelled as on the command line."""
        return [
            f"--{flag.name.replace('_', '-')}"
            for flag in fields(self)
            if getattr(self, flag.name) is not None
        ]


def plan_from_flags(
    flags: PlanningFlags,
    model: str | None = None,
    config: str | None = None,
    settings: Settings | None = None,
) -> Plan:
    """The plan for a checkpoint (`model`), a model config alone (`config`), or --max-model-len by itself.

    `settings` defaults to the environment. Raises InputError for flags that cannot be used, a length that the
    model's positions do not reach, or no length at all; CheckpointError when the model cannot be read.
    """
    if model is not None and config is not None:
        raise InputError("MODEL and --config were both given; give one of them")
    limits, origins = _limits(flags, model if model is not None else config)
    return make_plan(
        limits,
        flags.strategy,
        prompt_batch=_range("--prompt-batch", flags.prompt_batch),
        prompt_query=_range("--prompt-seq", flags.prompt_seq),
        prompt_context=_range("--prompt-context", flags.prompt_context),
        decode_batch=_range("--decode-batch", flags.decode_batch),
        decode_context=_range("--decode-seq", flags.decode_seq),
        settings=settings if settings is not None else Settings.from_environment(),
        limit_origins=origins,
    )


def _limits(flags: PlanningFlags, source: str | None) -> tuple[Limits, dict[str, str]]:
    length, origin = _model_length(flags.max_model_len, source)
    given = {
        "max_num_seqs": flags.max_num_seqs,
        "max_num_batched_tokens": flags.max_num_batched_tokens,
        "block_size": flags.block_size,
        "max_prompt_len": flags.max_prompt_len,
    }
    limits = Limits(length, **{name: value for name, value in given.items() if value is not None})
    origins = {name: "default" if given.get(name) is None else "flag" for name in limits.to_dict()}
    return limits, origins | {"max_model_len": origin}


def _model_length(flag: int | None, source: str | None) -> tuple[int, str]:
    """max_model_len and its origin, from the flag or the config, held against what the config allows."""
    if source is None:
        if flag is None:
            raise InputError("nothing to plan for: give MODEL, --config FILE or --max-model-len N")
        return flag, "flag"
    from llmc.compiler.checkpoint import read_config

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


def _range(flag: str, text: str | None) -> Range | None:
    if text is None:
        return None
    try:
        low, step, high = (int(number) for number in text.split(","))
    except ValueError:
        raise InputError(f"{flag} {text!r} is not {_RANGE}, three whole numbers such as 1,32,64") from None
    return Range(low, step, high, flag)
