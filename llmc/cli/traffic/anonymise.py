"""`llmc traffic anonymise`: a log with nothing left in it but what planning needs."""

from __future__ import annotations

from typing import Annotated

import typer

from llmc.cli.options import option
from llmc.cli.quantities import duration
from llmc.cli.traffic.common import FieldsFlag, FormatFlag, JsonFlag, OutputFlag, open_trace, say


def anonymise_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A log or trace of any format.")],
    output: OutputFlag,
    round_to: Annotated[int, option("--round-to", "N", "Round lengths up to multiples of N tokens.", min=1)] = 1,
    jitter: Annotated[
        str | None, option("--jitter", "T", "Move each time by up to T, by chance, e.g. 2s.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None,
        option(
            "--seed",
            "N",
            "Draw the same moves again; who knows N can take them back. Default: none.",
            show_default=False,
        ),
    ] = None,
    traffic_format: FormatFlag = None,
    fields: FieldsFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Keep of each request its lengths and the seconds since the first one, so that a log can leave the company.

    Prompts, answers, ids, users, addresses, models and dates are not copied. Lengths alone can tell who asked what to
    somebody who has the same prompts: --round-to and --jitter make that harder, and cost little of a plan.

    \b
    Example:
      llmc traffic anonymise server.log -o traffic.jsonl
      llmc traffic anonymise server.log --round-to 16 --jitter 5s -o traffic.jsonl.gz
    """
    from llmc.buckets.traffic.recording import anonymised, write

    trace = open_trace(file, traffic_format, fields, "anonymise")
    moved = duration("--jitter", jitter) or 0.0
    number = write(output, anonymised(trace, round_to=round_to, jitter=moved, seed=seed))
    say("anonymised", output, number, trace.counted(), as_json)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("anonymise")(anonymise_command)
