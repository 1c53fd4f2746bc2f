"""`llmc chat`: a conversation with a model, which is compiled where it was not yet."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress

import typer

from llmc.cli.flags import takes
from llmc.cli.grouped_help import GroupedCommand
from llmc.cli.on_demand import ModelArgument, TryFlags, answer
from llmc.cli.output import echo
from llmc.errors import InputError
from llmc.runtime.llm import BundleLLM

RESET, LEAVE = "/reset", "/exit"
LEAST = 32
"""Tokens that an answer has room for, or a quarter of a short context; else earlier turns are forgotten."""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("chat", cls=GroupedCommand)(takes(TryFlags, chat))


def chat(
    model: ModelArgument,
    *,
    flags: TryFlags,
) -> None:
    """Talk to a model, for a first try: a checkpoint is compiled before, and kept in the store for the next time.

    A line is a message; /reset forgets what was said, /exit or Ctrl-D ends, Ctrl-C ends an answer. Where the model's
    context is full, the earliest turns are forgotten.

    \b
    Example:
      llmc chat smollm2-demo
      llmc chat ./SmolLM2-135M-Instruct --system "You are terse." --temperature 0.7
    """
    with flags.opened(model) as llm:
        llm.prompts.template.check()  # a model without one, or with one that does not parse, is refused here
        turns: list[dict[str, str]] = []
        for said in _lines():
            if said == RESET:
                turns = []
                continue
            turns.append({"role": "user", "content": said})
            turns = _fitting(llm, flags, turns)
            prompt = {"messages": flags.conversation(turns)}
            try:
                made = answer(llm, prompt, flags)
            except KeyboardInterrupt:
                echo()
                turns.pop()
                continue
            turns.append({"role": "assistant", "content": made})


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


def _fitting(llm: BundleLLM, flags: TryFlags, turns: list[dict[str, str]]) -> list[dict[str, str]]:
    """The last of the turns for which there is room, that of an answer included (LEAST); from a user's on."""
    limits = llm.bundle.plan.limits
    longest = min(limits.longest_prompt, limits.max_model_len - min(LEAST, limits.max_model_len // 4))
    kept = turns
    while len(llm.encode({"messages": flags.conversation(kept)})) > longest:
        if len(kept) == 1:
            raise InputError(f"the message is longer than the {longest} tokens that a prompt may have here")
        kept = kept[2:]
    if len(kept) < len(turns):
        echo(f"llmc: {(len(turns) - len(kept)) // 2} earlier turns are forgotten: the context is full", err=True)
    return kept
