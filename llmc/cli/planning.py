"""The planning flags, which every command that plans shares, and the plan they ask for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import typer

from llmc.buckets.limits import DEFAULT_BLOCK_SIZE, DEFAULT_MAX_NUM_SEQS
from llmc.buckets.plan import Plan
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
    typer.Option("--prompt-batch", metavar=_RANGE, help="Prompts of one prompt step.", rich_help_panel=_PANEL),
]
PromptSeqFlag = Annotated[
    str | None,
    typer.Option("--prompt-seq", metavar=_RANGE, help="New tokens of each prompt in a step.", rich_help_panel=_PANEL),
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
    typer.Option("--decode-batch", metavar=_RANGE, help="Sequences of one decode step.", rich_help_panel=_PANEL),
]
DecodeSeqFlag = Annotated[
    str | None,
    typer.Option("--decode-seq", metavar=_RANGE, help="Cached tokens of each of them.", rich_help_panel=_PANEL),
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
        return [f"--{flag.name.replace('_', '-')}" for flag in fields(self) if getattr(self, flag.name) is not None]


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
    from llmc.compiler.planning import plan_for

    if model is not None and config is not None:
        raise InputError("MODEL and --config were both given; give one of them")
    return plan_for(
        model if model is not None else config,
        strategy=flags.strategy,
        max_model_len=flags.max_model_len,
        max_prompt_len=flags.max_prompt_len,
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        block_size=flags.block_size,
        prompt_batch=_range("--prompt-batch", flags.prompt_batch),
        prompt_seq=_range("--prompt-seq", flags.prompt_seq),
        prompt_context=_range("--prompt-context", flags.prompt_context),
        decode_batch=_range("--decode-batch", flags.decode_batch),
        decode_seq=_range("--decode-seq", flags.decode_seq),
        settings=settings,
    )


def _range(flag: str, text: str | None) -> Range | None:
    if text is None:
        return None
    try:
        low, step, high = (int(number) for number in text.split(","))
    except ValueError:
        raise InputError(f"{flag} {text!r} is not {_RANGE}, three whole numbers such as 1,32,64") from None
    return Range(low, step, high, flag)
