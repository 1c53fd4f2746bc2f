"""`llmc plan`: one file for each verb; without a verb, it makes a plan."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from llmc.cli.plan import capture, check, evaluate, export, fleet, hybrid, imports, make, show, tune

VERBS = (make, show, evaluate, export, imports, tune, check, capture, hybrid, fleet)
DEFAULT = "make"
FLAGS = ("--hybrid", "--fleet")
"""Verbs that may be written as flags."""


class VerbOrModel(TyperGroup):
    """A group whose first word may be a verb; anything else is what the default command takes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command in front of what begins with no verb; some flags are verbs, too."""
        if args and args[0] in FLAGS:
            args = [args[0].removeprefix("--"), *args[1:]]
        verb = bool(args) and args[0] in self.commands and args[0] != DEFAULT
        parsed: list[str] = super().parse_args(ctx, args if verb else [DEFAULT, *args])
        return parsed


app = typer.Typer(cls=VerbOrModel, rich_markup_mode=None)
for one in VERBS:
    one.register(app)


def register(root: typer.Typer) -> None:
    """Add the command group to `root`."""
    root.add_typer(app, name="plan", help="Choose the buckets to compile, for llmc and for other servers.")
