"""`llmc plan`: a group of verbs; without a verb it makes a plan."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from llmc.cli.options import add
from llmc.cli.plan.estimates import PlanCaptureCommand, PlanDisaggregatedCommand, PlanFleetCommand
from llmc.cli.plan.make import PlanMakeCommand, PlanShowCommand
from llmc.cli.plan.servers import (
    PlanCheckCommand,
    PlanEvaluateCommand,
    PlanExportCommand,
    PlanImportCommand,
    PlanTuneCommand,
)

VERBS = {
    "show": PlanShowCommand,
    "evaluate": PlanEvaluateCommand,
    "export": PlanExportCommand,
    "import": PlanImportCommand,
    "tune": PlanTuneCommand,
    "check": PlanCheckCommand,
    "capture": PlanCaptureCommand,
    "disaggregated": PlanDisaggregatedCommand,
    "fleet": PlanFleetCommand,
}
DEFAULT = "make"
FLAGS = ("--disaggregated", "--fleet")
"""Verbs that may also be written as flags."""


class VerbOrModel(TyperGroup):
    """A group whose first word may be a verb; anything else goes to the default command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command if no verb is given; turn flags that are verbs into verbs."""
        if args and args[0] in FLAGS:
            args = [args[0].removeprefix("--"), *args[1:]]
        verb = bool(args) and args[0] in self.commands and args[0] != DEFAULT
        parsed: list[str] = super().parse_args(ctx, args if verb else [DEFAULT, *args])
        return parsed


app = typer.Typer(
    cls=VerbOrModel, rich_markup_mode=None, help="Choose the buckets to compile, for llmc and for other servers."
)
add(app, DEFAULT, PlanMakeCommand, hidden=True)
for name, command in VERBS.items():
    add(app, name, command)
