"""What the verbs of `llmc plan` print and draw of llmc's own plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.buckets.plan import Plan
from llmc.buckets.report import text
from llmc.cli import output as output_bars
from llmc.cli.output import echo

if TYPE_CHECKING:
    from llmc.buckets.planner.choice import FrontierPoint
    from llmc.buckets.traffic.source import Traffic


def draw_to(path: Path, plans: list[tuple[str, Plan]], traffic: Traffic | None, points: list[FrontierPoint]) -> None:
    """Draw the plans to `path`, with the traffic on them."""
    from llmc.buckets.report.plan_page import draw

    draw(path, plans, traffic, points)
    output_bars.close_bars()
    echo(f"wrote {path}", err=True)


def print_plan(made: Plan, points: list[FrontierPoint], *, as_json: bool) -> None:
    """The report on a plan, or its JSON, with the frontier where there is one."""
    if not as_json:
        echo(text.plan_text(made), nl=False)
        if points:
            echo("\n" + text.frontier_text(points), nl=False)
        return
    for note in made.provenance.notes:
        if note.kind == "warning":
            echo(str(note), err=True)
    if points:
        echo(json.dumps({"plan": made.to_dict(), "frontier": [point.to_dict() for point in points]}))
    else:
        echo(made.to_json(), nl=False)


def print_for_server(made: Plan, name: str, *, as_json: bool) -> None:
    """The plan in the form of the server `name`, to paste; what the server leaves out or adds goes to stderr.

    Raises UnknownNameError, listing the known servers, and InputError for limits or lists that the server refuses.
    """
    from llmc.integrations import bucket_rules, report
    from llmc.integrations.configuration import Configuration, as_text, setup_for

    server = bucket_rules(name)
    setup = setup_for(server, made.limits.to_dict(), {})
    planned = Configuration("plan", setup, server.from_plan(setup, made))
    accepted = planned.accepted(server)
    for note in report.accepted(planned.name, accepted):
        echo(note, err=True)
    given = server.export(setup, accepted.lists)
    if as_json:
        echo(json.dumps({"plan": made.to_dict(), "environment": dict(given.environment),
                               "arguments": list(given.arguments), "files": dict(given.files)}))  # fmt: skip
    else:
        echo(as_text(given), nl=False)
