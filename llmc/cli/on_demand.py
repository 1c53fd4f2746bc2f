"""A model for a first try: its bundle, compiled where it is a checkpoint, and opened; and answers as they come."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmc.cli.options import option
from llmc.cli.output import CompileProgress

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
DeviceFlag = Annotated[str | None, option("--device", "D", "What to compile for.", rich_help_panel=_PANEL)]
QuantizeFlag = Annotated[
    str | None, option("--quantize", "none|int8|fp8|int4|keep", "Weights.", rich_help_panel=_PANEL)
]
LengthFlag = Annotated[
    int | None,
    option(
        "--max-model-len", "N", f"Tokens of one sequence. Default: the model's, {CONTEXT} at most.",
        rich_help_panel=_PANEL,
    ),
]  # fmt: skip
TokensFlag = Annotated[int | None, option("--max-tokens", "N", "Tokens of an answer at most. Default: what fits.")]
TemperatureFlag = Annotated[float, option("--temperature", "T", "0 is greedy.")]
SystemFlag = Annotated[str | None, option("--system", "TEXT", "The system's message, before the first of the user.")]
SeedFlag = Annotated[int | None, option("--seed", "S", "Makes sampling repeatable.")]


def opened(
    model: str, device: str | None, quantize: str | None, max_model_len: int | None, threads: int | None
) -> BundleLLM:
    """The model for one sequence at a time; its compile tells what it does on standard error.

    Raises what `llmc.compile` and opening raise.
    """
    from llmc.api import bundle_of
    from llmc.runtime.llm import BundleLLM

    asked = {"quantize": quantize, "max_model_len": max_model_len}
    options = {name: value for name, value in asked.items() if value is not None}
    if not _is_bundle(model):
        options = {"max_num_seqs": 1, "max_model_len": _context(model), **options}
    with CompileProgress(hidden=False) as progress:
        bundle: Path = bundle_of(model, device, options, progress)
    return BundleLLM(bundle, threads)


def answer(llm: BundleLLM, prompt: Prompt, **sampling: Any) -> str:
    """Print an answer as it comes, and give it."""
    from llmc.runtime.engine.sampling import SamplingParams

    parts = []
    for _, update, _ in llm.stream([prompt], SamplingParams(**sampling)):
        parts.append(update.text)
        typer.echo(update.text, nl=False)
        sys.stdout.flush()
    typer.echo()
    return "".join(parts)


def conversation(system: str | None, turns: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Messages of a conversation."""
    return [*([] if system is None else [{"role": "system", "content": system}]), *turns]


def _is_bundle(model: str) -> bool:
    from pathlib import Path

    from llmc.artifacts.local.references import is_reference
    from llmc.paths import is_file

    return is_file(Path(model, "manifest.json")) or is_reference(model)


def _context(model: str) -> int:
    from llmc.compiler.checkpoint import read_config

    longest = read_config(model).get("max_position_embeddings")
    return min(CONTEXT, longest) if isinstance(longest, int) else CONTEXT
