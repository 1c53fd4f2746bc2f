"""`llmc plan show PLAN` prints a plan as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmc.buckets.encoding import EncodePlan
from llmc.buckets.plan import Plan
from llmc.cli.options import option
from llmc.cli.output import echo
from llmc.cli.plan.printing import draw_to, print_plan
from llmc.errors import InputError
from llmc.files import read_text
from llmc.json_fields import Fields


def register(group: typer.Typer) -> None:
    """Add the command to `group`."""
    group.command("show")(show)


def show(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="PLAN", help="A plan of llmc plan -o.", show_default=False)
    ] = None,
    *,
    plot: Annotated[Path | None, option("--plot", "OUT", "Draw the plan: a .png, or a self-contained .html.")] = None,
    output: Annotated[str | None, option("--output -o", "FILE", "Write the plan here, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the report.")] = False,
) -> None:
    """Print a plan as it is.

    \b
    Example:
      llmc plan show plan.json
      llmc plan show plan.json --plot plan.html
    """
    if not files or len(files) != 1:
        raise InputError("llmc plan show takes one PLAN file; to plan for a model in a folder show, name ./show")
    text = read_text(files[0], "plan")
    if "task" in Fields.parse(text, files[0]).names():
        _show_pooled(EncodePlan.from_json(text, files[0]), plot, output, as_json)
        return
    made = Plan.from_json(text, files[0])
    if output is not None:
        made.save(output)
        echo(f"wrote {output}", err=True)
    if plot is not None:
        draw_to(plot, [(files[0], made)], None, [])
    print_plan(made, [], as_json=as_json)


def _show_pooled(made: EncodePlan, plot: Path | None, output: str | None, as_json: bool) -> None:
    if plot is not None:
        raise InputError(f"--plot draws plans to generate text, not one to {made.task}; leave it out")
    if output is not None:
        made.save(output)
        echo(f"wrote {output}", err=True)
    echo(made.to_json() if as_json else made.text())
