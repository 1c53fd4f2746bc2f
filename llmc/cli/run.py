"""`llmc run` and `llmc chat`: try a model. A checkpoint is compiled on first use; answers are streamed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.cli.options import Command, argument, device_flag, flag, quantize_flag, switch, threads_flag
from llmc.cli.output import CompileProgress, echo, say
from llmc.errors import InputError

if TYPE_CHECKING:
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
        """The bundle folder of `model`, compiled for `max_num_seqs` sequences if needed. Progress goes to stderr.

        Raises what `llmc.compile` and opening a bundle raise.
        """
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
    """Yield the messages, one a line, until end of input or LEAVE."""
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
