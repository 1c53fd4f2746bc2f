"""`llmc run` and `llmc chat`: a model for a first try, compiled if it is a checkpoint, and its answers as they come."""

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
"""Tokens of a sequence where none are asked for and the model takes as many."""
_PANEL = "For a MODEL that is no bundle"

_model = partial(
    argument, "MODEL", "A checkpoint (a folder, .gguf file or hub name), which is compiled first, or a bundle."
)


@dataclass(frozen=True, kw_only=True)
class OnDemandFlags(Command):
    """How a MODEL that is no bundle is compiled, as typed; None is a flag that was not given."""

    device: str | None = device_flag(None, "What to compile for.", panel=_PANEL)
    quantize: str | None = quantize_flag("Weights.", _PANEL)
    max_model_len: int | None = flag(
        None, "N", f"Tokens of one sequence. Default: the model's, {CONTEXT} at most.", _PANEL
    )

    def bundle_of(self, model: str, max_num_seqs: int, weights: str | None = None) -> Path:
        """The folder of its bundle; a compile for so many sequences tells what it does on standard error.

        Raises what `llmc.compile` and opening raise.
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
    """The options of `llmc run` and `llmc chat`."""

    system: str | None = flag(None, "TEXT", "The system's message, before the first of the user.")
    max_tokens: int | None = flag(None, "N", "Tokens of an answer at most. Default: what fits.")
    temperature: float = flag(0.0, "T", "0 is greedy.")
    seed: int | None = flag(None, "S", "Makes sampling repeatable.")
    threads: int | None = threads_flag()

    def opened(self, model: str) -> BundleLLM:
        """The model for one sequence at a time. Raises what `bundle_of` and opening raise."""
        from llmc.runtime.llm import BundleLLM

        return BundleLLM(self.bundle_of(model, 1), self.threads)

    def conversation(self, turns: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
        """Messages of a conversation."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *turns]

    def answer(self, llm: BundleLLM, prompt: Prompt) -> str:
        """Print an answer as it comes, and give it."""
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
    """Ask a model, for a first try: a checkpoint is compiled before, and kept in the store for the next time.

    The prompt is a user's message where the model has a chat template. `llmc compile`, `generate` and `serve` are for
    more than that.

    \b
    Example:
      llmc run smollm2-demo "Name three rivers in Europe."
      llmc run ./SmolLM2-135M-Instruct --device openvino --quantize int8 "What is a compiler?"
      llmc run bundle --raw "The capital of France is" --max-tokens 8
      git diff | llmc run ./model --system "Summarise this change."
    """

    model: str = _model()
    prompt: list[str] | None = argument("PROMPT", "What is asked; else standard input.", default=None)
    raw: bool = switch("--raw", "Continue the prompt as it is, without a chat template.")

    def run(self) -> None:
        requested = " ".join(self.prompt) if self.prompt else _from_input()
        if self.raw and self.system is not None:
            raise InputError("--system is a message of a chat template, which --raw leaves out; leave out one of them")
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
        raise InputError("standard input is empty: there is no prompt")
    return requested


RESET, LEAVE = "/reset", "/exit"
LEAST = 32
"""Tokens that an answer has room for, or a quarter of a short context; else earlier turns are forgotten."""


@dataclass(frozen=True, kw_only=True)
class ChatCommand(TryFlags):
    """Talk to a model, for a first try: a checkpoint is compiled before, and kept in the store for the next time.

    A line is a message; /reset forgets what was said, /exit or Ctrl-D ends, Ctrl-C ends an answer. Where the model's
    context is full, the earliest turns are forgotten.

    \b
    Example:
      llmc chat smollm2-demo
      llmc chat ./SmolLM2-135M-Instruct --system "You are terse." --temperature 0.7
    """

    model: str = _model()

    def run(self) -> None:
        with self.opened(self.model) as llm:
            llm.prompts.template.check()  # a model without one, or with one that does not parse, is refused here
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
        """The last of the turns for which there is room, that of an answer included (LEAST); from a user's on."""
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
    """What is typed or piped, a message a line, to its end or LEAVE."""
    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401 - lines can then be edited, and called back
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
