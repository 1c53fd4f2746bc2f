"""`llmc traffic sample`: a part of a log, drawn by chance."""

from __future__ import annotations

from typing import Annotated

import typer

from llmc.cli.options import option
from llmc.cli.quantities import fraction
from llmc.cli.traffic.common import FieldsFlag, FormatFlag, JsonFlag, OutputFlag, SeedFlag, open_trace, say
from llmc.errors import InputError


def sample_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A log or trace of any format.")],
    output: OutputFlag,
    number: Annotated[
        int | None, option("-n --number", "N", "So many requests, which takes two passes.", min=1, show_default=False)
    ] = None,
    share: Annotated[
        str | None, option("--share", "P", "Each request with this probability, e.g. 10%.", show_default=False)
    ] = None,
    seed: SeedFlag = 0,
    traffic_format: FormatFlag = None,
    fields: FieldsFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Draw a part of the requests. Times stay, so that fewer arrive a second: plan with --arrival-rate as it was.

    \b
    Example:
      llmc traffic sample requests.csv -n 10000 -o part.jsonl
      llmc traffic sample server.log --share 1% --seed 7 -o part.jsonl.gz
    """
    from llmc.buckets.traffic.recording import chosen, sampled, write

    part = fraction("--share", share)
    if (number is None) == (part is None):
        raise InputError("say how much to draw: -n N requests, or --share P of them")
    trace = open_trace(file, traffic_format, fields, "sample")
    summary = trace.summary() if number is not None else None
    if number is not None and summary is not None:
        requests = chosen(trace, number, summary.requests, seed)
    else:
        requests = sampled(trace, part or 0.0, seed)
    done = write(output, requests)
    notes = trace.counted()
    if summary is not None and summary.rate:
        notes.append(
            f"{summary.rate:.3g} requests a second arrived in the whole: plan with --arrival-rate {summary.rate:.3g}"
        )
    say("sampled", output, done, notes, as_json)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("sample")(sample_command)
