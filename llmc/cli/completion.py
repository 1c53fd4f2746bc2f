"""`llmc completion`: a script by which a shell asks `llmc` itself how a command line may go on."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from llmc.cli.options import one_of
from llmc.errors import UnknownNameError

SHELLS = ("bash", "zsh", "fish")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("completion")(completion)


def completion(
    shell: Annotated[
        str,
        typer.Argument(
            metavar="|".join(SHELLS), help="The shell.", show_default=False, autocompletion=one_of(lambda: SHELLS)
        ),
    ],
) -> None:
    """Print what lets a shell complete llmc's command lines: commands, options, devices, values and paths.

    \b
    Example:
      llmc completion bash >> ~/.bashrc
      llmc completion zsh >> ~/.zshrc           # below compinit
      llmc completion fish > ~/.config/fish/completions/llmc.fish
    """
    if shell not in SHELLS:
        raise UnknownNameError("shell", shell, SHELLS)
    typer.echo(get_completion_script(prog_name="llmc", complete_var="_LLMC_COMPLETE", shell=shell))
