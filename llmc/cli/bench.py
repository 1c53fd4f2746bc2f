"""`llmc bench`: time each bucket of a bundle, texts per second, or the engines behind `--device cpu`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from llmc.cli.options import Command, add, argument, bundle_argument, flag, rounds_flag, switch, threads_flag
from llmc.cli.output import StepProgress, echo, end_incomplete, sigterm_interrupts
from llmc.cli.pooling import TRUNCATE
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.bench.cpu_engines import Figures
    from llmc.bench.texts import TextBench
    from llmc.buckets.cost.bench import Bench
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.targets.cpu import Measured
    from llmc.runtime.bundle import Bundle
    from llmc.settings import Settings

BUCKETS = "buckets"
"""The default command."""
ROUNDS = 5
"""Default passes over all texts."""
INTERRUPTED = "interrupted.json"
"""File with the results of an interrupted `llmc bench cpu`, next to the bundles that it measured."""


class _Commands(TyperGroup):
    """Lets `llmc bench BUNDLE` stand for `llmc bench buckets BUNDLE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command if none is named."""
        if args and args[0] not in {"--help", *self.commands}:
            args = [BUCKETS, *args]
        return super().parse_args(ctx, args)


@dataclass(frozen=True, kw_only=True)
class BucketsCommand(Command):
    """Time every bucket of a bundle on this host, with all rows in use.

    llmc plan --bench and llmc plan evaluate --bench use the result to weigh plans in seconds instead of tokens.

    A bundle that embeds or scores is timed over --texts FILE: texts per second (median of --rounds) and padding. An
    interrupt prints the results so far.

    \b
    Example:
      llmc bench bundle -o bench.json
      llmc plan ./model --traffic requests.csv --bench bench.json --max-graphs 16
      llmc bench bge-bundle --texts lines.txt --rounds 9 --json
      llmc bench reranker-bundle --texts lines.txt --query "capital of France"
    """

    bundle: str = bundle_argument()
    seconds: float | None = flag(None, "S", "Seconds to spend on each bucket. Default: 0.3.", min=0.0)
    threads: int | None = threads_flag()
    texts: Path | None = flag(None, "FILE", "For a bundle that embeds or scores: the texts to time, one a line.")
    query: str | None = flag(None, "TEXT", "For a bundle that scores: the query.")
    truncate: bool = switch(*TRUNCATE)
    rounds: int | None = rounds_flag()
    output: Path | None = flag(
        None, "FILE", "Write the measurements here; llmc plan --bench reads those of buckets.", names="--output -o"
    )
    as_json: bool = switch("--json", "Print the measurements as JSON.")

    def run(self) -> None:
        from llmc.runtime.bundle import Bundle

        opened = Bundle.open(self.bundle)
        generates = opened.task == "generate"
        others, why = ["seconds"], f"is for models that generate; leave it out for a bundle to {opened.task}"
        if generates:
            others, why = ["texts", "query", "truncate", "rounds"], "is for models that embed or score"
        for name in others:
            if getattr(self, name) not in (None, False):
                raise InputError(f"--{name} {why}")
        hidden = self.as_json and not sys.stderr.isatty()
        found = self._buckets(opened, hidden) if generates else self._texts(opened, hidden)
        end_incomplete(found.unmeasured)

    def _buckets(self, bundle: Bundle, hidden: bool) -> Bench:
        from llmc.bench.bucket_times import measure

        with StepProgress("measure", hidden) as progress, sigterm_interrupts():
            found = measure(
                bundle, seconds=0.3 if self.seconds is None else self.seconds, threads=self.threads,
                report=lambda bucket, took, done, total: progress(f"{bucket}: {took * 1e3:.2f} ms", done, total),
            )  # fmt: skip
        if self.output is not None:
            found.save(self.output)
            echo(f"wrote {self.output}", err=True)
        echo(found.to_json() if self.as_json else _bucket_table(found), nl=False)
        return found

    def _texts(self, bundle: Bundle, hidden: bool) -> TextBench:
        from llmc.bench.texts import measure
        from llmc.files import read_text, write_text
        from llmc.runtime.pooling.tokens import WHOLE

        if self.texts is None:
            raise InputError(
                f"{bundle.path}: a bundle to {bundle.task} is timed over texts; give --texts FILE with one text a line"
            )
        if (self.query is None) == (bundle.task == "score"):
            what = "needs --query TEXT to score the texts for" if self.query is None else "takes no --query"
            raise InputError(f"{bundle.path}: a bundle to {bundle.task} {what}")
        given = [line for line in read_text(self.texts, "texts").splitlines() if line.strip()]
        if not given:
            raise InputError(f"{self.texts}: no text found; write one text a line")
        with StepProgress("measure", hidden) as progress, sigterm_interrupts():
            found = measure(
                bundle, given, query=self.query or "", rounds=self.rounds or ROUNDS,
                cut=WHOLE if self.truncate else None, threads=self.threads, report=progress,
            )  # fmt: skip
        if self.output is not None:
            write_text(self.output, json.dumps(found.to_dict(), indent=1) + "\n", "measurements")
            echo(f"wrote {self.output}", err=True)
        echo(json.dumps(found.to_dict()) if self.as_json else _text_report(found))
        return found


def _bucket_table(found: Bench) -> str:
    from llmc.buckets.render.text import table

    rows = [("phase", "batch", "query", "context", "ms", "samples")]
    for one in found.measurements:
        b = one.bucket
        rows.append((b.phase, str(b.batch), str(b.query), str(b.context), f"{one.seconds * 1e3:.2f}", str(one.samples)))
    return "\n".join([*table(rows, right=range(1, 6)), found.describe()]) + "\n"


def _text_report(found: TextBench) -> str:
    from llmc.buckets.render.text import table

    one = found.rounds[-1]
    how = f"{found.rate:,.1f} texts/s"
    if found.partial:
        how += ", interrupted in the first round"
    else:
        how += f" in the median of {len(found.rounds)} rounds, {found.best:,.1f} in the best"
    lines = [
        f"{found.bundle} on {found.device}, {found.threads} threads: {one.texts:,} texts, {one.tokens:,} tokens",
        f"{how}; {found.rate * one.tokens / one.texts:,.0f} tokens/s",
        f"{one.batches:,} batches, {one.padded:,} tokens computed: padding {one.padding:.1%}",
        f"compilations: {found.compilations}",
    ]
    if found.buckets:
        rows = [("batch", "tokens", "batches")]
        rows += [(str(batch), str(tokens), str(steps)) for (batch, tokens), steps in sorted(found.buckets.items())]
        lines += ["", *table(rows, right=range(3))]
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class CpuCommand(Command):
    """Compare the engines that --device cpu chooses from on this host, and print which it would choose and why.

    It measures decode steps, prefill, process start to first token, and memory, in int8 and in each engine's default
    format. llmc compile --device cpu uses the result for the same number of threads, similar models (type and
    size), and the same engine versions and options. Earlier measurements are kept. An interrupt prints and writes the
    results so far, which are not used for choices.

    \b
    Example:
      llmc bench cpu
      llmc bench cpu ./model --quick --json
    """

    model: str = argument("MODEL", "A model folder, .gguf file or hub name.", default="smollm2-demo", show_default=True)
    rounds: int | None = rounds_flag()
    quick: bool = switch("--quick", "Fewer rounds, for a first impression.")
    threads: int | None = threads_flag()
    output: Path | None = flag(
        None, "FILE", "Write the measurements here. Default: where --device cpu looks first.", names="--output -o"
    )
    as_json: bool = switch("--json", "Print the measurements as JSON.")

    def run(self) -> None:
        from llmc.bench.cpu_engines import record
        from llmc.compiler.checkpoint import open_checkpoint
        from llmc.compiler.targets.cpu import OWN, Measured, added, installed
        from llmc.files import write_text
        from llmc.settings import Settings

        settings = Settings.from_environment()
        work = settings.cache_dir / OWN.parent
        engines = installed()
        checkpoint = open_checkpoint(self.model)
        found = self._measured(checkpoint, engines, work, settings)
        if found.unfinished:  # a choice needs complete measurements
            write_text(work / INTERRUPTED, json.dumps(found.to_dict(), indent=1) + "\n", "the measurements")
            echo(f"wrote {work / INTERRUPTED}", err=True)
            echo(json.dumps(found.to_dict()) if self.as_json else "\n".join(_engine_table(found)))
            end_incomplete(found.unfinished)
        built = record(found, checkpoint, engines)
        file = self.output or settings.cache_dir / OWN
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(added(file, built), indent=1) + "\n", "the measurements")
        echo(f"wrote {file}", err=True)
        table = [*_engine_table(found), *_choices(Measured.of(built))]
        echo(json.dumps(built) if self.as_json else "\n".join(table))

    def _measured(self, checkpoint: Checkpoint, engines: tuple[str, ...], work: Path, settings: Settings) -> Figures:
        from llmc.bench.cpu_engines import Amount, cases, compiled, measure

        hidden, folder = self.as_json and not sys.stderr.isatty(), work / "bundles"
        bundles: dict[str, Bundle] = {}
        requested = cases(checkpoint, engines)
        with StepProgress("compile", hidden) as progress:
            for engine, kind in requested:
                name = f"{engine} {kind}"
                progress(name, len(bundles), len(requested))
                bundles[name] = compiled(checkpoint, engine, kind, folder / f"{engine}-{kind}", settings)
        amount, threads = Amount.of(self.quick, self.rounds), self.threads or settings.threads
        with StepProgress("measure", hidden) as progress, sigterm_interrupts():
            return measure(bundles, amount, threads, folder / "logs", progress)


def _engine_table(found: Figures) -> list[str]:
    """Medians of each bundle; a dash for a missing measurement."""
    from llmc.bench.cpu_engines import BATCHES, MEMORY, PROMPT, START, decode
    from llmc.buckets.render.text import table

    columns = [(decode(batch), 1.0, ".1f", "ms") for batch in BATCHES]
    columns += [(PROMPT, 1.0, ".0f", "ms"), (START, 1.0, ".2f", "s"), (MEMORY, 1e-6, ".0f", "MB")]
    rows: list[tuple[str, ...]] = [
        ("engine", "quantize", "decode 1", "4", "8", "16", "prompt 512", "first token", "memory")
    ]
    for name in sorted({name for figures in found.rounds.values() for name in figures}):
        medians = [(found.median(what, name), scale, form, unit) for what, scale, form, unit in columns]
        cells = ("–" if value is None else f"{value * scale:{form}} {unit}" for value, scale, form, unit in medians)
        rows.append((*name.split(" "), *cells))
    return table(rows, right=range(2, 9))


def _choices(measured: Measured) -> list[str]:
    """The engine that --device cpu would choose for each of its batch sizes, and why."""
    from llmc.compiler.targets.cpu import CpuCase, Wanted, choose

    last = {engine: list(kinds.items())[-1] for engine, kinds in measured.engines.items()}
    options = {engine: {"quantize": kind, **one["options"]} for engine, (kind, one) in last.items()}
    case = CpuCase(
        sorted(measured.isa), measured.threads, measured.model_type, measured.parameters, measured.versions, options
    )
    chosen = {batch: choose(Wanted(batch), [measured], case) for batch in (1, 4, 8, 16)}
    return [f"--max-num-seqs {batch}: {choice.engine}, since {choice.why}" for batch, choice in chosen.items()]


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="""Time every bucket of a bundle on this host, or compare the engines that --device cpu chooses from.

    llmc bench BUNDLE is short for llmc bench buckets BUNDLE. Write ./cpu for a bundle folder named cpu.

    \b
    Example:
      llmc bench bundle -o bench.json
      llmc bench bge-bundle --texts lines.txt --json
      llmc bench cpu
    """,
)
add(app, BUCKETS, BucketsCommand)
add(app, "cpu", CpuCommand)
