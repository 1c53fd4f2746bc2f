"""`llmc run`, `llmc chat` and `llmc generate`: answer prompts; a checkpoint is compiled on first use."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.buckets.limits import DEFAULT_MAX_NUM_SEQS
from llmc.cli import output as messages
from llmc.cli.options import (
    ENGINE,
    Command,
    argument,
    bundle_or_model_argument,
    device_flag,
    eager_flag,
    flag,
    prefill_flag,
    prompt_lookup_max_flag,
    prompt_lookup_min_flag,
    quantize_flag,
    speculate_flag,
    speculation,
    switch,
    threads_flag,
    weights_flag,
)
from llmc.cli.output import CompileProgress, echo, print_table, say
from llmc.errors import ArtifactError, CheckpointError, InputError, VerificationError
from llmc.paths import exists, expanded

if TYPE_CHECKING:
    from llmc.runtime.engine.kv_transfer import KVTransfer
    from llmc.runtime.engine.observer import FinishReason, StepRecord
    from llmc.runtime.engine.requests import RequestOutput
    from llmc.runtime.engine.sampling.params import SamplingParams
    from llmc.runtime.llm import BundleLLM
    from llmc.runtime.prompts import Prompt


CONTEXT = 2048
"""Default sequence length in tokens, if the model allows it."""
_PANEL = "If MODEL is a checkpoint"

_model = partial(
    argument, "MODEL", "A bundle, or a checkpoint (folder, .gguf file or hub name), which is compiled on first use."
)


@dataclass(frozen=True, kw_only=True)
class OnDemandFlags(Command):
    """Options for compiling a MODEL that is not a bundle yet; None means not given."""

    device: str | None = device_flag(None, "Target device.", panel=_PANEL)
    quantize: str | None = quantize_flag("Weight format.", _PANEL)
    max_model_len: int | None = flag(
        None, "N", f"Longest sequence in tokens. Default: the model's, at most {CONTEXT}.", _PANEL
    )

    def bundle_of(self, model: str, max_num_seqs: int, weights: str | None = None) -> Path:
        """The bundle folder of `model`, compiled for `max_num_seqs` sequences if needed, with progress on stderr."""
        from llmc.api import bundle_of, names_bundle

        requested = {"quantize": self.quantize, "max_model_len": self.max_model_len}
        options = {name: value for name, value in requested.items() if value is not None}
        if not names_bundle(model):
            options = {"max_num_seqs": max_num_seqs, "max_model_len": _context(model), **options}
        with CompileProgress(hidden=False) as progress:
            return bundle_of(model, self.device, options, progress, weights=weights)


@dataclass(frozen=True, kw_only=True)
class TryFlags(OnDemandFlags):
    """Options shared by `llmc run` and `llmc chat`."""

    system: str | None = flag(None, "TEXT", "System message.")
    max_tokens: int | None = flag(None, "N", "Most tokens per answer. Default: what fits.")
    temperature: float = flag(0.0, "T", "Sampling temperature; 0 is greedy.")
    seed: int | None = flag(None, "S", "Seed that makes sampling repeatable.")
    threads: int | None = threads_flag()

    def opened(self, model: str) -> BundleLLM:
        """Open the model for one sequence at a time. Raises what `bundle_of` and opening raise."""
        from llmc.runtime.llm import BundleLLM

        return BundleLLM(self.bundle_of(model, 1), self.threads)

    def conversation(self, turns: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
        """The messages of a conversation, with the system message first."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *turns]

    def answer(self, llm: BundleLLM, prompt: Prompt) -> str:
        """Stream an answer to stdout and return its text."""
        from llmc.runtime.engine.sampling.params import SamplingParams

        parts = []
        params = SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)
        for _, update, _ in llm.stream([prompt], params):
            parts.append(update.text)
            say(update.text)
        echo()
        return "".join(parts)


def _context(model: str) -> int:
    from llmc.compiler.checkpoint import read_config

    longest = read_config(model).get("max_position_embeddings")
    return min(CONTEXT, longest) if isinstance(longest, int) else CONTEXT


@dataclass(frozen=True, kw_only=True)
class RunCommand(TryFlags):
    """Answer one prompt with a model. A checkpoint is compiled on first use; its bundle is kept for the next time.

    The prompt is sent as a user message if the model has a chat template. For production use llmc compile, generate and
    serve.

    \b
    Example:
      llmc run smollm2-demo "Name three rivers in Europe."
      llmc run ./SmolLM2-135M-Instruct --device openvino --quantize int8 "What is a compiler?"
      llmc run bundle --raw "The capital of France is" --max-tokens 8
      git diff | llmc run ./model --system "Summarise this change."
    """

    model: str = _model()
    prompt: list[str] | None = argument("PROMPT", "The prompt. Default: read from standard input.", default=None)
    raw: bool = switch("--raw", "Continue the text as it is, without the chat template.")

    def run(self) -> None:
        requested = " ".join(self.prompt) if self.prompt else _from_input()
        if self.raw and self.system is not None:
            raise InputError("--system needs the chat template that --raw turns off; leave out one of them")
        with self.opened(self.model) as llm:
            plain = self.raw or (self.system is None and llm.bundle.chat_template is None)
            given: Prompt = (
                requested if plain else {"messages": self.conversation([{"role": "user", "content": requested}])}
            )
            self.answer(llm, given)


def _from_input() -> str:
    if sys.stdin.isatty():
        raise InputError('no prompt: llmc run MODEL "prompt", or a prompt on standard input (to talk: llmc chat MODEL)')
    requested = sys.stdin.read().strip()
    if not requested:
        raise InputError("no prompt: standard input is empty")
    return requested


RESET, LEAVE = "/reset", "/exit"
LEAST = 32
"""Tokens reserved for an answer (at most a quarter of a short context); earlier turns are dropped to make room."""


@dataclass(frozen=True, kw_only=True)
class ChatCommand(TryFlags):
    """Chat with a model. A checkpoint is compiled on first use; its bundle is kept for the next time.

    Each line is a message. /reset clears the conversation, /exit or Ctrl-D quits, Ctrl-C stops an answer. When the
    context is full, the earliest turns are dropped.

    \b
    Example:
      llmc chat smollm2-demo
      llmc chat ./SmolLM2-135M-Instruct --system "You are terse." --temperature 0.7
    """

    model: str = _model()

    def run(self) -> None:
        with self.opened(self.model) as llm:
            llm.prompts.template.check()  # refuses a missing or invalid template before the first message
            turns: list[dict[str, str]] = []
            for said in _lines():
                if said == RESET:
                    turns = []
                    continue
                turns.append({"role": "user", "content": said})
                turns = self._fitting(llm, turns)
                prompt = {"messages": self.conversation(turns)}
                try:
                    built = self.answer(llm, prompt)
                except KeyboardInterrupt:
                    echo()
                    turns.pop()
                    continue
                turns.append({"role": "assistant", "content": built})

    def _fitting(self, llm: BundleLLM, turns: list[dict[str, str]]) -> list[dict[str, str]]:
        """The latest turns that fit with an answer of LEAST tokens, starting at a user turn."""
        limits = llm.bundle.plan.limits
        longest = min(limits.longest_prompt, limits.max_model_len - min(LEAST, limits.max_model_len // 4))
        kept = turns
        while len(llm.encode({"messages": self.conversation(kept)})) > longest:
            if len(kept) == 1:
                raise InputError(f"the message is longer than the {longest} tokens that a prompt may have here")
            kept = kept[2:]
        if len(kept) < len(turns):
            echo(f"llmc: {(len(turns) - len(kept)) // 2} earlier turns are forgotten: the context is full", err=True)
        return kept


def _lines() -> Iterator[str]:
    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401 - line editing and history
    while True:
        try:
            said = (input("> ") if typed else input()).strip()
        except (EOFError, KeyboardInterrupt):
            if typed:
                echo()
            return
        if said == LEAVE:
            return
        if said:
            yield said


_SAMPLING = "Sampling"
_SAMPLED = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "ignore_eos")
"""Options that are fields of `SamplingParams`."""


@dataclass(frozen=True, kw_only=True)
class GenerateCommand(OnDemandFlags):
    """Answer prompts with a bundle. Nothing is compiled, and neither torch nor transformers is needed.

    A MODEL is compiled once, on first use: for one sequence at a time, or for 8 if there are several prompts. Its
    bundle is kept in the store. Use llmc compile for more options.

    With -v it also prints where the bundle's verification comes from: this host, a trusted signature, or neither.

    \b
    Example:
      llmc generate bundle --prompt "The capital of France is" --max-tokens 16 --show-buckets
      llmc generate bundle --chat --prompt "Name three rivers." --stream
      llmc generate bundle --prompts prompts.jsonl --json
      llmc generate smollm2-demo --chat --prompt "Name three rivers."
    """

    brief = True

    bundle: str = bundle_or_model_argument()
    source: str | None = argument("[-]", "- reads the prompts from standard input.", default=None)
    prompt: list[str] | None = flag(None, "TEXT", "A prompt. Repeatable.", names="--prompt -p")
    prompts: Path | None = flag(
        None, "FILE", "One prompt a line: plain text, or JSON with prompt or messages, max_tokens …"
    )
    chat: bool = switch("--chat", "Send each prompt as a user message of the chat template.")
    max_tokens: int = flag(128, "N", "Most tokens per answer.")
    temperature: float = flag(0.0, "T", "Sampling temperature; 0 is greedy.")
    top_p: float = flag(1.0, "P", "Nucleus sampling: keep tokens up to this total probability.", _SAMPLING)
    top_k: int = flag(0, "K", "Keep the K most probable tokens; 0 keeps all.", _SAMPLING)
    min_p: float = flag(0.0, "P", "Least probability relative to the most probable token.", _SAMPLING)
    repetition_penalty: float = flag(1.0, "R", "Values above 1 discourage repetition.", _SAMPLING)
    seed: int | None = flag(None, "S", "Seed that makes sampling repeatable.")
    stop: list[str] | None = flag(None, "S", "Stop before this text. Repeatable.")
    ignore_eos: bool = switch("--ignore-eos", "Continue after the end-of-sequence token.", _SAMPLING)
    stream: bool = switch("--stream", "Print text as it is generated.")
    weights: str | None = weights_flag()
    show_buckets: bool = switch("--show-buckets", "Print each step's bucket, padding, executable and time.")
    threads: int | None = flag(None, "N", "Threads. Default: LLMC_THREADS, else all CPUs.", ENGINE)
    speculate: int | None = speculate_flag()
    prompt_lookup_max: int | None = prompt_lookup_max_flag()
    prompt_lookup_min: int | None = prompt_lookup_min_flag()
    prefill: str | None = prefill_flag()
    lora_name: str | None = flag(None, "NAME", "Answer with this LoRA adapter of the bundle. Default: none.", ENGINE)
    enforce_eager: bool = eager_flag()
    as_json: bool = switch("--json", "Print one JSON object per prompt.")

    def run(self) -> None:
        from llmc.runtime.llm import BundleLLM

        sampling = {**self.values(*_SAMPLED), "stop": self.stop or None}
        if self.threads is not None and self.threads < 1:
            raise InputError(f"--threads {self.threads} must be at least 1")
        config = speculation(self.speculate, self.prompt_lookup_max, self.prompt_lookup_min)
        requested_for = _prompts(self.prompt, self.prompts, self.source, self.chat, sampling)
        given, params = [one for one, _ in requested_for], [how for _, how in requested_for]
        keeps = self.show_buckets or self.as_json or config is not None
        location = _bundle(self.bundle, self, len(given), self.weights)
        options = {"speculative_config": config, **self.values("prefill", "enforce_eager")}
        with BundleLLM(location, self.threads, keeps, **options) as llm:
            if messages.verbose:
                from llmc.cli.results import origin_line

                echo(f"llmc: {origin_line(self.bundle, llm.bundle.files)}", err=True)
            if self.stream and not self.as_json:
                records, reasons = _stream(llm, given, params, self.lora_name)
            else:
                outputs = llm.generate(given, params, lora=self.lora_name)
                records, reasons = llm.records, [output.outputs[0].finish_reason for output in outputs]
                for one, output in zip(given, outputs, strict=True):
                    _print(one, output, self.as_json, several=len(outputs) > 1)
            if self.show_buckets and not self.as_json:
                _print_steps(records)
            if not self.as_json and not messages.quiet:
                opened = f"; by the toolchain at open: {n}" if (n := len(llm.compilations_at_open)) else ""
                echo(f"compilations while serving: {llm.compilations}{opened}", err=True)
                if config is not None:
                    echo(_speculated(records), err=True)
        if failed := reasons.count("error"):
            raise VerificationError(
                f"{failed} of {len(reasons)} texts ended early: the logits contain NaN or infinity, because the graphs "
                f"or weights are damaged; run: llmc verify {self.bundle}"
            )


def _speculated(records: list[StepRecord]) -> str:
    drafted, accepted = sum(r.drafted for r in records), sum(r.accepted for r in records)
    share = f" ({accepted / drafted:.0%})" if drafted else ""
    return f"speculation: {drafted} tokens drafted, {accepted} accepted{share}, {len(records)} steps"


def _bundle(named: str, flags: OnDemandFlags, prompts: int, weights: str | None) -> Path:
    try:
        return flags.bundle_of(named, 1 if prompts == 1 else DEFAULT_MAX_NUM_SEQS, weights)
    except CheckpointError as e:
        if exists(expanded(named)):
            raise
        raise ArtifactError(str(e)) from e  # the missing path may as well have been a bundle


def _prompts(
    texts: list[str] | None, file: Path | None, source: str | None, chat: bool, sampling: dict[str, Any]
) -> list[Requested]:
    from llmc.runtime.engine.sampling.params import SamplingParams

    given = [bool(texts), file is not None, source is not None]
    if sum(given) != 1:
        raise InputError("give the prompts in one way: --prompt TEXT, --prompts FILE, or - for standard input")
    if source not in (None, "-"):
        raise InputError(
            f"unexpected argument {source!r}; give prompts with --prompt or --prompts, or - for standard input"
        )
    if texts:
        common = SamplingParams(**sampling)
        found: list[Requested] = [(text, common) for text in texts]
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
    llm: BundleLLM, requested: list[Any], params: list[SamplingParams], lora: str | None
) -> tuple[list[StepRecord], list[FinishReason | None]]:  # fmt: skip
    """Returns the steps of all answers and why each ended."""
    records: list[StepRecord] = []
    reasons: list[FinishReason | None] = []
    for one, how in zip(requested, params, strict=True):
        reason = None
        for _, update, _ in llm.stream([one], how, lora=lora):
            say(update.text)
            reason = update.finish_reason
        reasons.append(reason)
        echo()
        records += llm.records
    return records, reasons


def _print(requested: Any, output: RequestOutput, as_json: bool, several: bool) -> None:
    completion = output.outputs[0]
    if as_json:
        echo(
            json.dumps(
                {
                    "prompt": requested["messages"] if isinstance(requested, dict) else requested,
                    "prompt_token_ids": output.prompt_token_ids,
                    "token_ids": completion.token_ids,
                    "text": completion.text,
                    "finish_reason": completion.finish_reason,
                    "buckets": [_step_json(s) for s in output.steps],
                    "timings": {
                        "first_token_s": output.timings.first_token_s,
                        "total_s": output.timings.total_s,
                        **_handed_json(output.timings.kv_transfer),
                    },
                }
            )
        )
        return
    if several:
        shown = requested["messages"][-1]["content"] if isinstance(requested, dict) else requested
        echo(f"> {shown}")
    say(f"{completion.text}\n")


def _handed_json(cost: KVTransfer | None) -> dict[str, Any]:
    return {} if cost is None else {"kv_transfer": {**asdict(cost), "gb_per_s": cost.gb_per_s}}


def _step_json(step: StepRecord) -> dict[str, Any]:
    return {
        "phase": step.phase, "batch": step.batch, "query": step.query, "context": step.context,
        "live_rows": step.live_rows, "padding_tokens": step.padding_tokens, "executable": step.executable,
        "drafted_tokens": step.drafted, "accepted_tokens": step.accepted,
        "prepare_s": step.prepare_s, "execute_s": step.execute_s, "sample_s": step.sample_s,
    }  # fmt: skip


def _print_steps(records: list[StepRecord]) -> None:
    """One row per run of steps in the same bucket; times are means in milliseconds."""
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
    table: list[tuple[str, ...]] = []
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
    print_table(header, table)


_NOT_SHOWN = ("n", "best_of", "logprobs", "prompt_logprobs", "output_kind", "structured_outputs", "detokenize")

Requested = tuple[Any, "SamplingParams"]
"""A prompt as BundleLLM takes it, and its sampling parameters."""


def parse(text: str, source: str, flags: Mapping[str, Any]) -> list[Requested]:
    """Parse prompts: JSON lines if the first line is a JSON object, else one prompt a line. `flags` are sampling
    parameters.

        line     = {"prompt": text | [token id, …]} | {"messages": [message, …]}, with members that SamplingParams has
        message  = {"role": …, "content": …}

    A member of a line overrides the flag of its name. Raises InputError with `source`, the line number and the reason
    for members that are unknown or that one printed text could not show.
    """
    from llmc.runtime.engine.sampling.params import SamplingParams

    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines or not lines[0][1].lstrip().startswith("{"):
        common = SamplingParams(**flags)
        return [(line, common) for _, line in lines]
    found: list[Requested] = []
    for number, line in lines:
        try:
            found.append(_requested(line, flags))
        except InputError as e:
            raise InputError(f"{source}, line {number}: {e}") from None
    return found


def _requested(line: str, flags: Mapping[str, Any]) -> Requested:
    from dataclasses import fields

    from llmc.runtime.engine.sampling.params import SamplingParams
    from llmc.runtime.text.chat import check_messages

    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise InputError(f"not JSON ({e})") from None
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise InputError("needs either a field prompt or a field messages")
    allowed = [f.name for f in fields(SamplingParams) if f.name not in _NOT_SHOWN]
    given = {name: member for name, member in value.items() if name not in ("prompt", "messages")}
    if unknown := sorted(given.keys() - set(allowed)):
        raise InputError(f"unknown field {unknown[0]!r}; known: prompt, messages, {', '.join(allowed)}")
    params = SamplingParams(**{**flags, **{name: member for name, member in given.items() if member is not None}})
    if "messages" in value:
        check_messages(value["messages"])
        return {"messages": value["messages"]}, params
    if not _is_prompt(value["prompt"]):
        raise InputError("prompt must be a text or a list of token ids")
    return value["prompt"], params


def _is_prompt(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value))
