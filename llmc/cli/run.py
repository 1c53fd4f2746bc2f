"""`llmc run`: one answer of a model, which is compiled where it was not yet."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.flags import takes
from llmc.cli.grouped_help import GroupedCommand
from llmc.cli.on_demand import ModelArgument, TryFlags, answer
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.runtime.llm import BundleLLM
    from llmc.runtime.prompts import Prompt


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("run", cls=GroupedCommand)(takes(TryFlags, run))


def run(
    model: ModelArgument,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="What is asked; else standard input.", show_default=False),
    ] = None,
    *,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    flags: TryFlags,
) -> None:
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
    asked = " ".join(prompt) if prompt else _from_input()
    if raw and flags.system is not None:
        raise InputError("--system is a message of a chat template, which --raw leaves out; leave out one of them")
    with flags.opened(model) as llm:
        given: Prompt = asked if raw or (flags.system is None and not _chats(llm)) else _message(asked, flags)
        answer(llm, given, flags)


def _message(asked: str, flags: TryFlags) -> Prompt:
    return {"messages": flags.conversation([{"role": "user", "content": asked}])}


def _chats(llm: BundleLLM) -> bool:
    return llm.bundle.chat_template is not None


def _from_input() -> str:
    if sys.stdin.isatty():
        raise InputError('no prompt: llmc run MODEL "prompt", or a prompt on standard input (to talk: llmc chat MODEL)')
    asked = sys.stdin.read().strip()
    if not asked:
        raise InputError("standard input is empty: there is no prompt")
    return asked
