"""`llmc bench`: how long each bucket of a bundle takes here, against other engines, and a server under load."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from llmc.cli import bench_cpu, bench_serve, bench_texts
from llmc.cli.bench_serve import refuse
from llmc.cli.options import BundleArgument, QuickFlag, RoundsFlag, ThreadsFlag, option
from llmc.cli.output import echo
from llmc.cli.pooling import TruncateFlag
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.buckets.cost.bench import Bench

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
    help="""Time every bucket of a bundle on this host, compare it with other engines, or put a server under load.

    llmc bench BUNDLE is short for llmc bench buckets BUNDLE; a bundle in a folder called serve is ./serve.

    \b
    Example:
      llmc bench bundle -o bench.json
      llmc bench bundle --against onnxruntime-genai,openvino-genai,llama-cpp --peer-python .venv-peers/bin/python
      llmc bench bge-bundle --texts lines.txt
      llmc bench serve http://127.0.0.1:8000 --concurrency 8 --json
      llmc bench cpu
    """,
)


def register(root: typer.Typer) -> None:
    """Add the commands to `root`."""
    root.add_typer(app, name="bench")


@app.command(BUCKETS)
def buckets(
    bundle: BundleArgument,
    *,
    seconds: Annotated[
        float | None, option("--seconds", "S", "Time to spend on each bucket. Default: 0.3.", min=0.0)
    ] = None,
    threads: ThreadsFlag = None,
    against: Annotated[
        str | None,
        option(
            "--against",
            "PEERS",
            "Compare with other engines on the same weights: onnxruntime-genai, openvino-genai, llama-cpp, "
            "transformers; each may have a precision, as in onnxruntime-genai:int4.",
        ),
    ] = None,
    peer_python: Annotated[
        Path | None, option("--peer-python", "PY", "Python of the environment that has the peers. Default: ours.")
    ] = None,
    peer_models: Annotated[
        Path | None, option("--peer-models", "DIR", "Keep the peers' forms of the model here. Default: the cache.")
    ] = None,
    model: Annotated[
        str | None, option("--model", "MODEL", "The checkpoint. Default: the one it was compiled from.")
    ] = None,
    only: Annotated[
        str | None,
        option(
            "--only",
            "KINDS",
            "Of quality, decode, prefill, first-token, memory, streams, trace (with --traffic). Default: all.",
        ),
    ] = None,
    rounds: RoundsFlag = None,
    quick: QuickFlag = False,
    traffic: Annotated[
        Path | None, option("--traffic", "FILE", "A trace (.csv, .jsonl): serve requests of its lengths.")
    ] = None,
    scale: Annotated[float | None, option("--scale", "F", "Multiply the trace's lengths. Default: 0.125.")] = None,
    texts: Annotated[
        Path | None,
        option("--texts", "FILE", "Of a bundle that embeds or scores: one text a line, timed all together."),
    ] = None,
    query: Annotated[
        str | None, option("--query", "TEXT", "Of a bundle that scores: what all texts are to fit.")
    ] = None,
    truncate: TruncateFlag = False,
    output: Annotated[
        Path | None, option("--output -o", "FILE", "Write the measurements here; buckets': for llmc plan --bench.")
    ] = None,
    plot: Annotated[
        Path | None, option("--plot", "OUT", "Draw the comparison: a .png, or a self-contained .html.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
) -> None:
    """Time every bucket of a bundle on this host, full of live rows; or --against others, compare whole engines.

    With the buckets' times llmc plan --bench and llmc plan evaluate --bench count seconds in place of tokens.

    A bundle that embeds or scores is timed over --texts FILE: texts a second in the median of --rounds, and padding. An
    interrupt shows what was measured.

    A comparison takes turns in every round, on prompts that nobody has seen, and measures how near each engine is to
    float32; ratios are against the best peer of the bundle's quality class.

    \b
    Example:
      llmc bench bundle -o bench.json
      llmc plan ./model --traffic requests.csv --bench bench.json --max-graphs 16
      llmc bench bundle --against openvino-genai,llama-cpp --peer-python .venv-peers/bin/python --plot bench.html
      llmc bench bge-bundle --texts lines.txt --rounds 9 --json
      llmc bench reranker-bundle --texts lines.txt --query "capital of France"
    """
    from llmc.runtime.bundle import Bundle

    pooled: dict[str, object] = {"--texts": texts, "--query": query, "--truncate": truncate or None}
    if any(value is not None for value in pooled.values()) or against is None:
        opened = Bundle.open(bundle)
        if opened.task != "generate":
            others: dict[str, object] = {
                "--against": against, "--seconds": seconds, "--peer-python": peer_python, "--peer-models": peer_models,
                "--model": model, "--only": only, "--quick": quick or None, "--traffic": traffic, "--scale": scale,
                "--plot": plot,
            }  # fmt: skip
            refuse(f"is for models that generate; leave it out for a bundle to {opened.task}", True, others)
            bench_texts.run(opened, texts, query, truncate, rounds, threads, output, as_json)
            return
        refuse("is for models that embed or score", True, pooled)
    if against is not None:
        from llmc.cli import bench_against

        refuse("has no effect with --against", True, {"--seconds": seconds})
        if scale is not None and not 0 < scale < math.inf:
            raise InputError(f"--scale {scale:g} must be above 0")
        refuse("needs --traffic", traffic is None, {"--scale": scale})
        flags = bench_against.Flags(
            against,
            peer_python,
            peer_models,
            model,
            only,
            rounds,
            quick,
            traffic,
            scale,
            threads,
            output,
            plot,
            as_json,
        )
        bench_against.run(bundle, flags)
        return
    refuse(
        "needs --against", True,
        {"--peer-python": peer_python, "--peer-models": peer_models, "--model": model, "--only": only,
         "--rounds": rounds, "--quick": quick or None, "--traffic": traffic, "--scale": scale, "--plot": plot},
    )  # fmt: skip
    _buckets(bundle, 0.3 if seconds is None else seconds, threads, output, as_json)


def _buckets(bundle: str, seconds: float, threads: int | None, output: Path | None, as_json: bool) -> None:
    from llmc.bench.bucket_times import measure
    from llmc.cli.interrupts import end_incomplete, sigterm_interrupts
    from llmc.cli.output import StepProgress
    from llmc.runtime.bundle import Bundle

    opened = Bundle.open(bundle)
    hidden = as_json and not sys.stderr.isatty()
    with StepProgress("measure", hidden) as progress, sigterm_interrupts():
        found = measure(
            opened, seconds=seconds, threads=threads,
            report=lambda bucket, took, done, total: progress(f"{bucket}: {took * 1e3:.2f} ms", done, total),
        )  # fmt: skip
    if output is not None:
        found.save(output)
        echo(f"wrote {output}", err=True)
    echo(found.to_json() if as_json else _text(found), nl=False)
    end_incomplete(found.unmeasured)


bench_serve.register(app)
bench_cpu.register(app)


def _text(found: Bench) -> str:
    from llmc.buckets.render.text import table

    rows = [("phase", "batch", "query", "context", "ms", "samples")]
    for one in found.measurements:
        b = one.bucket
        rows.append((b.phase, str(b.batch), str(b.query), str(b.context), f"{one.seconds * 1e3:.2f}", str(one.samples)))
    return "\n".join([*table(rows, right=range(1, 6)), found.describe()]) + "\n"
