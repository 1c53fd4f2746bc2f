"""`llmc generate`: answers from a bundle."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmc.buckets.limits import DEFAULT_MAX_NUM_SEQS
from llmc.cli import output as messages
from llmc.cli.accuracy import origin_line
from llmc.cli.flags import takes
from llmc.cli.grouped_help import add
from llmc.cli.on_demand import OnDemandFlags
from llmc.cli.options import ENGINE, BundleOrModelArgument, EagerFlag, PrefillFlag, WeightsFlag, option
from llmc.cli.output import echo, say
from llmc.cli.prompt_lines import Asked, parse
from llmc.cli.speculation import LookupMax, LookupMin, Speculate, asked
from llmc.errors import ArtifactError, CheckpointError, InputError, VerificationError
from llmc.paths import exists, expanded

if TYPE_CHECKING:
    from llmc.runtime.engine.handover import HandOver
    from llmc.runtime.engine.observer import FinishReason, StepRecord
    from llmc.runtime.engine.requests import RequestOutput
    from llmc.runtime.engine.sampling.params import SamplingParams
    from llmc.runtime.llm import BundleLLM

_SAMPLING = "Sampling"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    add(app, "generate", takes(OnDemandFlags, generate))


def generate(
    bundle: BundleOrModelArgument,
    source: Annotated[
        str | None,
        typer.Argument(metavar="[-]", help="- reads prompts from standard input.", show_default=False),
    ] = None,
    *,
    prompt: Annotated[list[str] | None, option("--prompt -p", "TEXT", "A prompt; may be repeated.")] = None,
    prompts: Annotated[
        Path | None, option("--prompts", "FILE", "JSON lines (prompt or messages; max_tokens …), or plain lines.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap each prompt as a user's message in the chat template.")
    ] = False,
    max_tokens: Annotated[int, option("--max-tokens", "N", "Tokens to produce at most.")] = 128,
    temperature: Annotated[float, option("--temperature", "T", "0 is greedy.")] = 0.0,
    top_p: Annotated[float, option("--top-p", "P", "Nucleus probability.", rich_help_panel=_SAMPLING)] = 1.0,
    top_k: Annotated[int, option("--top-k", "K", "Most probable tokens kept; 0: all.", rich_help_panel=_SAMPLING)] = 0,
    min_p: Annotated[
        float, option("--min-p", "P", "Least probability, relative to the best token's.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    repetition_penalty: Annotated[
        float, option("--repetition-penalty", "R", "Over 1 discourages repetition.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    seed: Annotated[int | None, option("--seed", "S", "Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, option("--stop", "S", "End before this text; may be repeated.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the model's end token.", rich_help_panel=_SAMPLING)
    ] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    weights: WeightsFlag = None,
    show_buckets: Annotated[
        bool, typer.Option("--show-buckets", help="Show each step's bucket, padding, executable and time.")
    ] = False,
    threads: Annotated[
        int | None, option("--threads", "N", "Default: LLMC_THREADS or the CPUs.", rich_help_panel=ENGINE)
    ] = None,
    speculate: Speculate = None,
    prompt_lookup_max: LookupMax = None,
    prompt_lookup_min: LookupMin = None,
    prefill: PrefillFlag = None,
    lora_name: Annotated[
        str | None,
        option("--lora-name", "NAME", "Answer with this adapter of the bundle. Default: none.", rich_help_panel=ENGINE),
    ] = None,
    enforce_eager: EagerFlag = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt.")] = False,
    flags: OnDemandFlags,
) -> None:
    """Answer prompts by replaying a bundle's graphs, which compiles nothing and needs neither torch nor transformers.

    A MODEL is compiled first, once: its bundle is kept in the store, for one sequence at a time, or with several
    prompts for 8. `llmc compile` has more options, and `llmc run` is for one question.

    -v says where the bundle's verification comes from: made here, signed by a trusted key, or neither.

    \b
    Example:
      llmc generate bundle --prompt "The capital of France is" --max-tokens 16 --show-buckets
      llmc generate bundle --chat --prompt "Name three rivers." --stream
      llmc generate bundle --prompts prompts.jsonl --json
      llmc generate smollm2-demo --chat --prompt "Name three rivers."
    """
    from llmc.runtime.llm import BundleLLM

    sampling: dict[str, Any] = {
        "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": seed, "stop": stop or None, "ignore_eos": ignore_eos,
    }  # fmt: skip
    if threads is not None and threads < 1:
        raise InputError(f"--threads {threads} must be at least 1")
    speculation = asked(speculate, prompt_lookup_max, prompt_lookup_min)
    asked_for = _prompts(prompt, prompts, source, chat, sampling)
    given, params = [one for one, _ in asked_for], [how for _, how in asked_for]
    keeps = show_buckets or as_json or speculation is not None
    place = _bundle(bundle, flags, len(given), weights)
    options: dict[str, Any] = {"speculative_config": speculation, "prefill": prefill, "enforce_eager": enforce_eager}
    with BundleLLM(place, threads, keeps, **options) as llm:
        if messages.verbose:
            echo(f"llmc: {origin_line(bundle, llm.bundle.files)}", err=True)
        if stream and not as_json:
            records, reasons = _stream(llm, given, params, lora_name)
        else:
            outputs = llm.generate(given, params, lora=lora_name)
            records, reasons = llm.records, [output.outputs[0].finish_reason for output in outputs]
            for one, output in zip(given, outputs, strict=True):
                _print(one, output, as_json, several=len(outputs) > 1)
        if show_buckets and not as_json:
            _print_steps(records)
        if not as_json and not messages.quiet:
            opened = f"; by the toolchain at open: {n}" if (n := len(llm.compilations_at_open)) else ""
            echo(f"compilations while serving: {llm.compilations}{opened}", err=True)
            if speculation is not None:
                echo(_speculated(records), err=True)
    if failed := reasons.count("error"):
        raise VerificationError(
            f"{failed} of {len(reasons)} texts ended early: the model's logits were no numbers, so that its graphs or "
            f"weights are damaged; run: llmc verify {bundle}"
        )


def _speculated(records: list[StepRecord]) -> str:
    """The counts of drafts."""
    drafted, accepted = sum(r.drafted for r in records), sum(r.accepted for r in records)
    share = f" ({accepted / drafted:.0%})" if drafted else ""
    return f"speculation: {drafted} tokens drafted, {accepted} accepted{share}, {len(records)} steps"


def _bundle(named: str, flags: OnDemandFlags, prompts: int, weights: str | None) -> Path:
    try:
        return flags.bundle(named, 1 if prompts == 1 else DEFAULT_MAX_NUM_SEQS, weights)
    except CheckpointError as e:
        if exists(expanded(named)):
            raise
        raise ArtifactError(str(e)) from e  # a bundle that is missing, as likely as a checkpoint


def _prompts(
    texts: list[str] | None, file: Path | None, source: str | None, chat: bool, sampling: dict[str, Any]
) -> list[Asked]:
    from llmc.runtime.engine.sampling.params import SamplingParams

    given = [bool(texts), file is not None, source is not None]
    if sum(given) != 1:
        raise InputError("give the prompts in one way: --prompt TEXT, --prompts FILE, or - for standard input")
    if source not in (None, "-"):
        raise InputError(
            f"unexpected argument {source!r}; prompts come by --prompt, --prompts, or - for standard input"
        )
    if texts:
        common = SamplingParams(**sampling)
        found: list[Asked] = [(text, common) for text in texts]
    elif file is not None:
        try:
            found = parse(file.read_text(encoding="utf-8"), str(file), sampling)
        except (OSError, UnicodeDecodeError) as e:
            raise InputError(f"{file}: prompts cannot be read: {e}") from e
    else:
        found = parse(sys.stdin.read(), "standard input", sampling)
    if not found:
        raise InputError("there is no prompt")
    if not chat:
        return found
    return [({"messages": [{"role": "user", "content": p}]} if isinstance(p, str) else p, how) for p, how in found]


def _stream(
    llm: BundleLLM, asked: list[Any], params: list[SamplingParams], lora: str | None
) -> tuple[list[StepRecord], list[FinishReason | None]]:  # fmt: skip
    """Print texts as they come, one prompt after the other; returns the steps of all, and why each ended."""
    records: list[StepRecord] = []
    reasons: list[FinishReason | None] = []
    for one, how in zip(asked, params, strict=True):
        reason = None
        for _, update, _ in llm.stream([one], how, lora=lora):
            say(update.text)
            reason = update.finish_reason
        reasons.append(reason)
        echo()
        records += llm.records
    return records, reasons


def _print(asked: Any, output: RequestOutput, as_json: bool, several: bool) -> None:
    completion = output.outputs[0]
    if as_json:
        echo(
            json.dumps(
                {
                    "prompt": asked["messages"] if isinstance(asked, dict) else asked,
                    "prompt_token_ids": output.prompt_token_ids,
                    "token_ids": completion.token_ids,
                    "text": completion.text,
                    "finish_reason": completion.finish_reason,
                    "buckets": [_step_json(s) for s in output.steps],
                    "timings": {
                        "first_token_s": output.timings.first_token_s,
                        "total_s": output.timings.total_s,
                        **_handed_json(output.timings.handover),
                    },
                }
            )
        )
        return
    if several:
        shown = asked["messages"][-1]["content"] if isinstance(asked, dict) else asked
        echo(f"> {shown}")
    say(f"{completion.text}\n")


def _handed_json(cost: HandOver | None) -> dict[str, Any]:
    return {} if cost is None else {"handover": {**asdict(cost), "gb_per_s": cost.gb_per_s}}


def _step_json(step: StepRecord) -> dict[str, Any]:
    return {
        "phase": step.phase, "batch": step.batch, "query": step.query, "context": step.context,
        "live_rows": step.live_rows, "padding_tokens": step.padding_tokens, "executable": step.executable,
        "drafted_tokens": step.drafted, "accepted_tokens": step.accepted,
        "prepare_s": step.prepare_s, "execute_s": step.execute_s, "sample_s": step.sample_s,
    }  # fmt: skip


def _print_steps(records: list[StepRecord]) -> None:
    """One row for each run of steps in the same bucket; times are means in milliseconds."""
    rows: list[tuple[Any, list[StepRecord]]] = []
    for r in records:
        context = r.context if r.executable.split()[0] != "any" else -1
        key = (r.phase, r.batch, r.query, context, r.live_rows, r.executable)
        if rows and rows[-1][0] == key:
            rows[-1][1].append(r)
        else:
            rows.append((key, [r]))
    header: tuple[str, ...] = (
        "steps", "phase", "batch x query + context", "rows", "padding", "executable", "prepare", "execute", "sample",
    )  # fmt: skip
    drafts = any(r.drafted for r in records)
    if drafts:
        header = (*header, "accepted")
    table = [header]
    at = 0
    for (phase, batch, query, _, live, executable), run in rows:
        mean = [
            f"{1e3 * sum(getattr(r, f) for r in run) / len(run):.2f} ms" for f in ("prepare_s", "execute_s", "sample_s")
        ]
        first, last_context = run[0].context, run[-1].context
        contexts = f"{first}" if first == last_context else f"{first}…{last_context}"
        steps = f"{at + 1}" if len(run) == 1 else f"{at + 1}–{at + len(run)}"
        padding = f"{sum(r.padding_tokens for r in run)} tokens"
        cells = (steps, phase, f"{batch} x {query} + {contexts}", str(live), padding, executable, *mean)
        held = f"{sum(r.accepted for r in run)} of {sum(r.drafted for r in run)}"
        table.append((*cells, held) if drafts else cells)
        at += len(run)
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    for row in table:
        echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
