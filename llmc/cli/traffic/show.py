"""`llmc traffic show`: what traffic looks like, from a file or from a running server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmc.cli.options import option
from llmc.cli.output import ReadingProgress, StepProgress, close_bars, echo
from llmc.cli.quantities import duration
from llmc.cli.traffic.common import FieldsFlag, FormatFlag, JsonFlag, fields_of
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.buckets.report.traffic_view import View
    from llmc.buckets.traffic.length_histogram import Lengths

MIN, DEFAULT_FOR, DEFAULT_EVERY = 1.0, "60s", "5s"


def show_command(
    file: Annotated[
        str, typer.Argument(metavar="FILE|URL", help="A log, trace or scrape; or a server's http://…/metrics.")
    ],
    plot: Annotated[
        Path | None, option("--plot", "OUT", "Draw it: a .png, or a self-contained .html.", show_default=False)
    ] = None,
    slots: Annotated[
        int, option("--max-num-seqs", "N", "Requests that the simulated server runs at once.", min=1)
    ] = 256,
    seconds: Annotated[
        str | None, option("--for", "T", f"Sample the URL for so long. Default: {DEFAULT_FOR}.", show_default=False)
    ] = None,
    every: Annotated[
        str | None, option("--every", "T", f"Scrape it so often. Default: {DEFAULT_EVERY}.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, option("--output -o", "OUT", "Keep what the URL told, for --traffic.", show_default=False)
    ] = None,
    traffic_format: FormatFlag = None,
    fields: FieldsFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the lengths of requests, how many run at once, and how both change over time.

    Prometheus histograms know lengths by interval, and percentiles are intervals then. Logs of steps (CUDA graph
    tables, batch sizes, missing buckets) show their shapes.

    \b
    Example:
      llmc traffic show requests.csv --plot traffic.html
      llmc traffic show server.log --json
      llmc traffic show access.log --fields prompt=usage.in,output=usage.out,time=time_iso8601
      llmc traffic show http://localhost:8000/metrics --for 10m -o sampled.prom
    """
    from llmc.buckets.render.page import check
    from llmc.buckets.report.traffic_view import view
    from llmc.buckets.traffic.formats.prometheus.live import is_url

    if plot is not None:
        check(plot)
    if is_url(file):
        if traffic_format or fields:
            raise InputError("a URL is read as Prometheus metrics; leave out --traffic-format and --fields")
        found: View = view(_sampled(file, seconds, every, output))
    else:
        for name, given in (("--for", seconds), ("--every", every), ("--output", output)):
            if given is not None:
                raise InputError(f"{name} is for a URL, which is sampled; {file} is a file")
        bar = ReadingProgress(f"read {file}", "finish")
        found = view(file, format=traffic_format, fields=fields_of(fields), slots=slots, progress=bar)
    close_bars()
    if plot is not None:
        from llmc.buckets.report.traffic_page import draw

        draw(plot, file, found)
        echo(f"wrote {plot}", err=True)
    for note in found.notes:
        echo(note, err=True)
    echo(json.dumps(_json(file, found)) if as_json else found.text, nl=as_json)


def _sampled(url: str, seconds: str | None, every: str | None, output: Path | None) -> Lengths:
    from llmc.buckets.traffic.formats.prometheus.live import sample
    from llmc.buckets.traffic.formats.prometheus.scrape import text
    from llmc.files import write_text

    time = max(MIN, duration("--for", seconds or DEFAULT_FOR) or 0.0)
    step = max(MIN, duration("--every", every or DEFAULT_EVERY) or 0.0)
    with StepProgress("sample") as progress:
        found = sample(
            url,
            time,
            step,
            lambda gone, total, number: progress(f"{number:,} requests in {gone:.0f} s", round(gone), round(total)),
        )
    if output is not None:
        write_text(output, text(found), "sample")
        echo(f"wrote {output}", err=True)
    return found


def _json(file: str, found: View) -> dict[str, Any]:
    return {"file": file, "format": found.format, **found.document, "notes": list(found.notes)}


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("show")(show_command)
