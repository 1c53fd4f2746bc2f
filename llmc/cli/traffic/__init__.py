"""`llmc traffic`: one file for each command."""

from __future__ import annotations

import typer

from llmc.cli.traffic import anonymise, merge, sample, show

app = typer.Typer(
    help="Look at recorded traffic of any format; merge, sample and anonymise it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for command in (show, merge, sample, anonymise):
    command.register(app)


def register(root: typer.Typer) -> None:
    """Add the command group to `root`."""
    root.add_typer(app, name="traffic")
