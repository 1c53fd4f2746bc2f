"""`llmc bench cpu`: measure the engines that `--device cpu` chooses between, and say what it would choose."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmc.cli.options import QuickFlag, RoundsFlag, ThreadsFlag, option
from llmc.cli.output import echo

if TYPE_CHECKING:
    from llmc.bench.peers.results import Comparison
    from llmc.bench.peers.scope import Scope
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.targets.cpu.auto_engine import Measured

SEQUENCES, LENGTH = 16, 1024
"""What the measured bundles run: the largest batch, and room for the prompts."""

INTERRUPTED = "interrupted.json"
"""What an interrupted run measured, beside the bundles that it measured."""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("cpu")(cpu)


def cpu(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model folder, .gguf file or hub name.")
    ] = "smollm2-demo",
    *,
    rounds: RoundsFlag = None,
    quick: QuickFlag = False,
    threads: ThreadsFlag = None,
    output: Annotated[
        Path | None, option("--output -o", "FILE", "Write here. Default: where --device cpu looks first.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
) -> None:
    """Measure the engines that --device cpu chooses between on this host, and say what it would choose, and why.

    Decode steps, a prompt, the time to the first token and memory, in turn, in int8 and in what each engine would
    compile the model with by default. What is measured is kept beside what was
    measured before, and llmc compile --device cpu chooses by it where it holds: for as many threads, models alike (by
    type and size), the same versions of the engines, and the same options. Interrupted, it shows and writes what it
    has as llmc bench --against does, and choices go on by what was measured before.

    \b
    Example:
      llmc bench cpu
      llmc bench cpu ./model --quick --json
    """
    from llmc.bench.peers.report_text import text
    from llmc.buckets.files import write_text
    from llmc.cli.interrupts import end_incomplete
    from llmc.compiler.checkpoint import open_checkpoint
    from llmc.compiler.targets.cpu.auto_engine import OWN, Measured, added, installed
    from llmc.settings import Settings

    settings = Settings.from_environment()
    hidden = as_json and not sys.stderr.isatty()
    count = threads or settings.threads
    work = settings.cache_dir / "measurements"
    engines = installed()
    checkpoint = open_checkpoint(model)
    found, scope = _measure(checkpoint, model, work, engines, count, rounds, quick, hidden)
    if found.unfinished:  # a choice needs all of it
        found.save(work / INTERRUPTED)
        echo(f"wrote {work / INTERRUPTED}", err=True)
        echo(json.dumps(found.to_dict()) + "\n" if as_json else text(found), nl=False)
        end_incomplete(found.unfinished)
    record = _record(found, scope, checkpoint, engines)
    file = output or settings.cache_dir / OWN
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(added(file, record), indent=1) + "\n", "the measurements")
    echo(f"wrote {file}", err=True)
    echo(json.dumps(record) if as_json else _text(Measured.of(record)))


def _measure(
    checkpoint: Checkpoint, model: str, folder: Path, engines: tuple[str, ...], threads: int, rounds: int | None,
    quick: bool, hidden: bool,
) -> tuple[Comparison, Scope]:  # fmt: skip
    """What was measured of a bundle of each engine and quantisation, and what was asked for."""
    from dataclasses import replace

    from llmc.bench.contenders import make_ready
    from llmc.bench.peers import compare
    from llmc.bench.peers.scope import Scope
    from llmc.cli.interrupts import sigterm_interrupts
    from llmc.cli.output import StepProgress
    from llmc.runtime.bundle import Bundle

    scope = Scope(kinds=("decode", "prefill", "first-token", "memory"), prompts=(512,))
    scope = scope.quick() if quick else scope
    scope = scope if rounds is None else replace(scope, rounds=rounds)
    work = folder / "bundles"
    bundles: dict[str, Bundle] = {}
    cases = [(engine, kind) for engine in engines for kind in _kinds(engine, checkpoint)]
    with StepProgress("compile", hidden) as compiled:
        for engine, kind in cases:
            name = f"{engine} {kind}"
            compiled(name, len(bundles), len(cases))
            bundles[name] = Bundle.open(_compiled(model, engine, kind, work / f"{engine}-{kind}"))
    ready = make_ready(bundles, (), checkpoint, work, sys.executable, lambda _: None, quality=False)
    with StepProgress("measure", hidden) as progress, sigterm_interrupts():
        return compare.run(
            ready.contenders, scope, model=ready.model, threads=threads, vocabulary=ready.vocabulary,
            logs=work / "logs", progress=progress, weights=ready.weights,
        ), scope  # fmt: skip


def _kinds(engine: str, checkpoint: Checkpoint) -> list[str]:
    """What is measured of an engine: PLAIN, which all offer, and last its own default for the model."""
    from llmc.compiler.model_size import weights_of
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.cpu.auto_engine import PLAIN, configured

    default = str(configured(engine, CompileOptions(engine), weights_of(checkpoint))["quantize"])
    return list(dict.fromkeys((PLAIN, default)))


def _record(found: Comparison, scope: Scope, checkpoint: Checkpoint, engines: tuple[str, ...]) -> dict[str, Any]:
    """The measurements as `--device cpu` chooses by them."""
    from llmc.compiler.model_size import weights_of
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.cpu.auto_engine import OPTIONS, configured, versions
    from llmc.runtime.host import cpu_features

    return {
        "machine": f"{found.host['cpu']}, {found.threads} threads",
        "isa": list(cpu_features()),
        "threads": found.threads,
        "model": checkpoint.name,
        "model_type": str(checkpoint.config.get("model_type")),
        "parameters": sum(weights.count for weights in weights_of(checkpoint)),
        "versions": versions(engines),
        "engines": {
            engine: {
                kind: {
                    "options": {
                        n: v for n, v in configured(engine, CompileOptions(engine, kind)).items() if n in OPTIONS
                    },
                    **_one(found, f"{engine} {kind}", scope.batches),
                }
                for kind in _kinds(engine, checkpoint)
            }
            for engine in engines
        },
    }


def _compiled(model: str, engine: str, kind: str, folder: Path) -> Path:
    from llmc.artifacts.local.opening import open_store
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.pipeline.compile import compile_bundle
    from llmc.compiler.pipeline.planning import plan_for
    from llmc.settings import Settings

    settings = Settings.from_environment()
    plan = plan_for(model, max_model_len=LENGTH, max_num_seqs=SEQUENCES)
    store = open_store(None, settings, engine)
    options = CompileOptions(engine, kind, verify="none", jobs=settings.threads)
    compile_bundle(model, folder, plan, options, store, lambda _: None)
    return folder


def _one(found: Comparison, name: str, batches: tuple[int, ...]) -> dict[str, Any]:
    medians = {series.name: series.median(name) for series in found.series if name in series.rounds}
    memory = next(value for what, value in medians.items() if what.startswith("memory"))
    return {
        "decode_ms": {str(b): round(medians[f"decode step, batch {b}"], 3) for b in batches},
        "prefill_ms": {"512": round(medians["prefill of 512 tokens"], 2)},
        "start_s": round(medians["process start to first token"] / 1e3, 3),
        "memory_bytes": int(memory * 1e6),
    }


def _text(measured: Measured) -> str:
    from llmc.buckets.text_table import table
    from llmc.compiler.targets.cpu.auto_engine import CpuCase, Wanted, choose

    rows: list[tuple[str, ...]] = [
        ("engine", "quantize", "decode 1", "4", "8", "16", "prompt 512", "first token", "memory")
    ]
    for engine, kinds in measured.engines.items():
        for kind, one in kinds.items():
            steps = (f"{one['decode_ms'][b]:.1f} ms" for b in (1, 4, 8, 16))
            prompt, start = one["prefill_ms"][512], one["start_s"]
            rows.append(
                (engine, kind, *steps, f"{prompt:.0f} ms", f"{start:.2f} s", f"{one['memory_bytes'] / 1e6:.0f} MB")
            )
    lines = table(rows, right=range(2, 9))
    last = {engine: list(kinds.items())[-1] for engine, kinds in measured.engines.items()}
    options = {engine: {"quantize": kind, **one["options"]} for engine, (kind, one) in last.items()}
    case = CpuCase(
        sorted(measured.isa), measured.threads, measured.model_type, measured.parameters, measured.versions, options
    )
    for batch in (1, 4, 8, 16):
        choice = choose(Wanted(batch), [measured], case)
        lines.append(f"--max-num-seqs {batch}: {choice.engine}, since {choice.why}")
    return "\n".join(lines)
