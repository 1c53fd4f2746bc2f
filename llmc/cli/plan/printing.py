"""What the verbs of `llmc plan` print and draw of llmc's own plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmc.buckets import report
from llmc.buckets.plan import Plan
from llmc.cli import output as output_bars

if TYPE_CHECKING:
    from llmc.buckets.frontier import FrontierPoint
    from llmc.buckets.traffic.source import Traffic


def draw_to(path: Path, plans: list[tuple[str, Plan]], traffic: Traffic | None, points: list[FrontierPoint]) -> None:
    """Draw the plans to `path`, with the traffic on them."""
    from llmc.buckets.plots import draw

    draw(path, plans, traffic, points)
    output_bars.close_bars()
    typer.echo(f"wrote {path}", err=True)


def print_plan(made: Plan, points: list[FrontierPoint], *, as_json: bool) -> None:
    """The report on a plan, or its JSON, with the frontier where there is one."""
    if not as_json:
        typer.echo(report.text(made), nl=False)
        if points:
            from llmc.buckets.frontier import text

            typer.echo("\n" + text(points), nl=False)
        return
    for note in made.provenance.notes:
        if note.kind == "warning":
            typer.echo(str(note), err=True)
    if points:
        typer.echo(json.dumps({"plan": made.to_dict(), "frontier": [point.to_dict() for point in points]}))
    else:
        typer.echo(made.to_json(), nl=False)
