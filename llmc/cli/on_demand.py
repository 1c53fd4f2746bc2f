"""A model for a first try: its bundle, compiled where it is a checkpoint, and opened; and answers as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.options import ThreadsFlag, device_option, option
from llmc.cli.output import CompileProgress, echo, say

if TYPE_CHECKING:
    from pathlib import Path

    from llmc.runtime.llm import BundleLLM
    from llmc.runtime.prompts import Prompt

CONTEXT = 2048
"""Tokens of a sequence where none are asked for and the model takes as many."""
_PANEL = "For a MODEL that is no bundle"

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", show_default=False,
        help="A checkpoint (a folder, .gguf file or hub name), which is compiled first, or a bundle.",
    ),
]  # fmt: skip


@dataclass(frozen=True)
class OnDemandFlags:
    """How a MODEL that is no bundle is compiled, as typed; None is a flag that was not given."""

    device: Annotated[str | None, device_option("", "What to compile for.", rich_help_panel=_PANEL)] = None
    quantize: Annotated[str | None, option("", "none|int8|fp8|int4|keep", "Weights.", rich_help_panel=_PANEL)] = None
    max_model_len: Annotated[
        int | None,
        option("", "N", f"Tokens of one sequence. Default: the model's, {CONTEXT} at most.", rich_help_panel=_PANEL),
    ] = None

    def bundle(self, model: str, max_num_seqs: int, weights: str | None = None) -> Path:
        """The folder of its bundle; a compile for so many sequences tells what it does on standard error.

        Raises what `llmc.compile` and opening raise.
        """
        from llmc.api import bundle_of, names_bundle

        asked = {"quantize": self.quantize, "max_model_len": self.max_model_len}
        options = {name: value for name, value in asked.items() if value is not None}
        if not names_bundle(model):
            options = {"max_num_seqs": max_num_seqs, "max_model_len": _context(model), **options}
        with CompileProgress(hidden=False) as progress:
            return bundle_of(model, self.device, options, progress, weights=weights)


@dataclass(frozen=True)
class TryFlags(OnDemandFlags):
    """The flags of `llmc run` and `llmc chat`."""

    system: Annotated[str | None, option("", "TEXT", "The system's message, before the first of the user.")] = None
    max_tokens: Annotated[int | None, option("", "N", "Tokens of an answer at most. Default: what fits.")] = None
    temperature: Annotated[float, option("", "T", "0 is greedy.")] = 0.0
    seed: Annotated[int | None, option("", "S", "Makes sampling repeatable.")] = None
    threads: ThreadsFlag = None

    def opened(self, model: str) -> BundleLLM:
        """The model for one sequence at a time. Raises what `bundle` and opening raise."""
        from llmc.runtime.llm import BundleLLM

        return BundleLLM(self.bundle(model, 1), self.threads)

    def conversation(self, turns: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
        """Messages of a conversation."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *turns]


def answer(llm: BundleLLM, prompt: Prompt, flags: TryFlags) -> str:
    """Print an answer as it comes, and give it."""
    from llmc.runtime.engine.sampling.params import SamplingParams

    parts = []
    params = SamplingParams(max_tokens=flags.max_tokens, temperature=flags.temperature, seed=flags.seed)
    for _, update, _ in llm.stream([prompt], params):
        parts.append(update.text)
        say(update.text)
    echo()
    return "".join(parts)


def _context(model: str) -> int:
    from llmc.compiler.checkpoint import read_config

    longest = read_config(model).get("max_position_embeddings")
    return min(CONTEXT, longest) if isinstance(longest, int) else CONTEXT
