"""`llmc bench`: how long each bucket of a bundle takes here, and how a server holds under load."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from llmc.cli import bench_serve

if TYPE_CHECKING:
    from llmc.buckets.bench_file import Bench

BUCKETS = "buckets"
"""The command that is meant where none is named."""


class _Commands(TyperGroup):
    """`llmc bench BUNDLE` is `llmc bench buckets BUNDLE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put in the command's name where it was left out."""
        if args and args[0] not in {"--help", *self.commands}:
            args = [BUCKETS, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="""Time every bucket of a bundle on this host, or put a server under load.

    llmc bench BUNDLE is short for llmc bench buckets BUNDLE; a bundle in a folder called serve is ./serve.

    \b
    Example:
      llmc bench bundle -o bench.json
      llmc bench serve http://127.0.0.1:8000 --concurrency 8 --json
    """,
)


def register(root: typer.Typer) -> None:
    """Add the commands to `root`."""
    root.add_typer(app, name="bench")


@app.command(BUCKETS)
def buckets(
    bundle: Annotated[
        str,
        typer.Argument(metavar="BUNDLE", help="A bundle folder, archive, store:KEY or oci://….", show_default=False),
    ],
    *,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", min=0.0, help="Time to spend on each bucket.")
    ] = 0.3,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, help="Default: LLMC_THREADS or the CPUs.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the measurements here, for llmc plan --bench."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
) -> None:
    """Time every bucket of a bundle on this host, full of live rows: what padding to it costs.

    llmc plan --bench and llmc plan evaluate --bench then count seconds in place of tokens.

    \b
    Example:
      llmc bench bundle -o bench.json
      llmc plan ./model --traffic requests.csv --bench bench.json --max-graphs 16
    """
    from llmc.cli.output import StepProgress
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.measure import measure

    opened = Bundle.open(bundle)
    with StepProgress("measure", hidden=as_json and not sys.stderr.isatty()) as progress:
        found = measure(
            opened, seconds=seconds, threads=threads,
            report=lambda bucket, took, done, total: progress(f"{bucket}: {took * 1e3:.2f} ms", done, total),
        )  # fmt: skip
    if output is not None:
        found.save(output)
        typer.echo(f"wrote {output}", err=True)
    typer.echo(found.to_json() if as_json else _text(found), nl=False)


bench_serve.register(app)


def _text(found: Bench) -> str:
    from llmc.buckets.text_table import table

    rows = [("phase", "batch", "query", "context", "ms", "samples")]
    for one in found.measurements:
        b = one.bucket
        rows.append((b.phase, str(b.batch), str(b.query), str(b.context), f"{one.seconds * 1e3:.2f}", str(one.samples)))
    return "\n".join([*table(rows, right=range(1, 6)), found.describe()]) + "\n"
