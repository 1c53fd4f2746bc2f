"""`llmc plan MODEL` makes a plan; `llmc plan show PLAN` prints one."""

from __future__ import annotations

from typing import Annotated

import typer

from llmc.buckets import report
from llmc.buckets.plan import Plan
from llmc.cli.planning import (
    BlockSizeFlag,
    DecodeBatchFlag,
    DecodeSeqFlag,
    MaxModelLenFlag,
    MaxNumBatchedTokensFlag,
    MaxNumSeqsFlag,
    MaxPromptLenFlag,
    PlanningFlags,
    PromptBatchFlag,
    PromptContextFlag,
    PromptSeqFlag,
    StrategyFlag,
    plan_from_flags,
)
from llmc.errors import InputError

SHOW = "show"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("plan")(plan)


def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL | show PLAN",
            help="A model folder, .gguf file or hub name; or the word show and a plan file.",
            show_default=False,
        ),
    ] = None,
    *,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="A config.json, in place of MODEL.")
    ] = None,
    strategy: StrategyFlag = None,
    max_model_len: MaxModelLenFlag = None,
    max_prompt_len: MaxPromptLenFlag = None,
    max_num_seqs: MaxNumSeqsFlag = None,
    max_num_batched_tokens: MaxNumBatchedTokensFlag = None,
    block_size: BlockSizeFlag = None,
    prompt_batch: PromptBatchFlag = None,
    prompt_seq: PromptSeqFlag = None,
    prompt_context: PromptContextFlag = None,
    decode_batch: DecodeBatchFlag = None,
    decode_seq: DecodeSeqFlag = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan here, as JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON in place of the report.")] = False,
) -> None:
    """Choose the buckets to compile, and report what they are and why. Compiles nothing.

    Every plan covers every request its limits admit; what that adds to the ranges, or drops from them, is
    reported. A model in a folder called show is ./show.

    \b
    Example:
      llmc plan ./SmolLM2-135M-Instruct --max-model-len 2048 --max-num-seqs 4 -o plan.json
      llmc plan --config config.json --prompt-batch 1,32,4 --prompt-seq 128,128,1024
      llmc plan show plan.json
    """
    flags = PlanningFlags(
        strategy=strategy,
        max_model_len=max_model_len,
        max_prompt_len=max_prompt_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        prompt_batch=prompt_batch,
        prompt_seq=prompt_seq,
        prompt_context=prompt_context,
        decode_batch=decode_batch,
        decode_seq=decode_seq,
    )
    arguments = words or []
    if arguments[:1] == [SHOW]:
        unused = [*flags.given(), *(["--config"] if config is not None else [])]
        made = _load(arguments[1:], unused)
    elif len(arguments) > 1:
        raise InputError(f"llmc plan takes one MODEL, not {len(arguments)}: {' '.join(arguments)}")
    else:
        made = plan_from_flags(flags, arguments[0] if arguments else None, config)
    if output is not None:
        made.save(output)
        typer.echo(f"wrote {output}", err=True)
    _print(made, as_json=as_json)


def _load(files: list[str], unused: list[str]) -> Plan:
    if len(files) != 1:
        raise InputError("llmc plan show takes one PLAN file; to plan for a model in a folder show, name ./show")
    if unused:
        raise InputError(f"llmc plan show prints a plan as it is; leave out {', '.join(unused)}")
    return Plan.load(files[0])


def _print(made: Plan, *, as_json: bool) -> None:
    if not as_json:
        typer.echo(report.text(made), nl=False)
        return
    for note in made.provenance.notes:
        if note.kind == "warning":
            typer.echo(str(note), err=True)
    typer.echo(made.to_json(), nl=False)
