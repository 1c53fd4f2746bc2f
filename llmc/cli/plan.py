"""`llmc plan MODEL` makes a plan, `llmc plan show PLAN` prints one, `llmc plan evaluate PLAN` replays traffic on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.buckets import report
from llmc.buckets.plan import Plan
from llmc.cli import output as output_bars
from llmc.cli.flags import takes_own_options
from llmc.cli.options import option
from llmc.cli.planning import PlanningFlags, open_traffic, plan_from_flags, planning_arguments, takes_planning_flags
from llmc.compiler.options import Value
from llmc.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from llmc.buckets.evaluation import Evaluation
    from llmc.buckets.frontier import FrontierPoint
    from llmc.buckets.traffic.lengths import End
    from llmc.compiler.options import CompileOptions

SHOW, EVALUATE = "show", "evaluate"
UNCERTAIN: tuple[End, End] = ("low", "high")
EVALUATE_FLAGS = {"--traffic", "--traffic-format", "--fields", "--arrival-rate", "--clip", "--bench"}


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("plan")(takes_own_options(takes_planning_flags(plan)))


def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL | show PLAN | evaluate PLAN…",
            help="A model folder, .gguf file or hub name; or the word show or evaluate and plan files.",
            show_default=False,
        ),
    ] = None,
    *,
    config: Annotated[str | None, option("--config", "FILE", "A config.json, in place of MODEL.")] = None,
    device: Annotated[
        str | None,
        option("--device", "D", "Estimate compile time and memory for this device. Default with MODEL: cpu."),
    ] = None,
    quantize: Annotated[
        str | None, option("--quantize", "none|int8|int4|keep", "Estimate with weights quantised so.")
    ] = None,
    dtype: Annotated[
        str | None, option("--dtype", "auto|f32|bf16|f16", "Estimate with unquantised numbers held so.")
    ] = None,
    bundle: Annotated[
        Path | None, option("--bundle", "BUNDLE", "Estimate by the weights and builds of a bundle compiled before.")
    ] = None,
    frontier: Annotated[
        bool, typer.Option("--frontier", help="Also tabulate waste against the number of graphs.")
    ] = False,
    plot: Annotated[Path | None, option("--plot", "OUT", "Draw the plan: a .png, or a self-contained .html.")] = None,
    output: Annotated[str | None, option("--output -o", "FILE", "Write the plan here, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the report.")] = False,
    flags: PlanningFlags,
    own: dict[str, Value],
) -> None:
    """Choose the buckets to compile, and report what they are and why. Compiles nothing.

    Every plan covers every request its limits admit; what that adds to the ranges, or drops from them, is
    reported. A model in a folder called show is ./show.

    \b
    Example:
      llmc plan ./SmolLM2-135M-Instruct --max-model-len 2048 --max-num-seqs 4 -o plan.json
      llmc plan --config config.json --prompt-batch 1,32,4 --prompt-seq 128,128,1024
      llmc plan --config config.json --traffic requests.csv --max-graphs 24 --plot plan.html -o plan.json
      llmc plan --config config.json --traffic requests.csv --max-waste 15% --device hpu
      llmc plan show plan.json
      llmc plan evaluate plan.json other.json --traffic requests.csv
    """
    from llmc.compiler.options import CompileOptions, flag_of

    arguments = words or []
    priced: dict[str, object] = {
        "--device": device,
        "--bundle": bundle,
        "--quantize": quantize,
        "--dtype": dtype,
        **{flag_of(name): value for name, value in own.items()},
    }
    named = any(given is not None for given in priced.values())
    others: dict[str, object] = {"--config": config, **priced, "--frontier": frontier or None}
    estimates = ""
    if arguments[:1] == [EVALUATE]:
        _refuse(EVALUATE, flags, {**others, "--output": output}, EVALUATE_FLAGS)
        _evaluate(arguments[1:], flags, plot, as_json=as_json)
        return
    if arguments[:1] == [SHOW]:
        _refuse(SHOW, flags, others, set())
        made = _load_one(arguments[1:])
        points: list[FrontierPoint] = []
        model = None
    elif len(arguments) > 1:
        raise InputError(f"llmc plan takes one MODEL, not {len(arguments)}: {' '.join(arguments)}")
    else:
        model = arguments[0] if arguments else None
        for name, given in priced.items():
            if given is not None and model is None and config is None:
                raise InputError(f"{name} estimates what a model costs there: give MODEL or --config FILE")
        options = CompileOptions(device or "cpu", quantize, dtype or "auto", own=own)
        made = plan_from_flags(flags, model, config, device=device, options=options)
        points = _frontier(flags, model, config) if frontier else []
        if named or not as_json:
            estimates = _estimates(made, model if model is not None else config, options, named, flags, bundle)
        output_bars.close_bars()
    if output is not None:
        made.save(output)
        typer.echo(f"wrote {output}", err=True)
    if plot is not None:
        _plot(plot, [(output or "plan", made)], flags, points)
    _print(made, points, as_json=as_json)
    if estimates and not as_json:
        typer.echo("\n" + estimates, nl=False)


def _refuse(verb: str, flags: PlanningFlags, others: Mapping[str, object], allowed: set[str]) -> None:
    given = [*flags.given(), *(name for name, value in others.items() if value is not None)]
    unused = [name for name in given if name not in allowed]
    if unused:
        what = "prints a plan as it is" if verb == SHOW else "replays traffic on plans as they are"
        raise InputError(f"llmc plan {verb} {what}; leave out {', '.join(unused)}")


def _load_one(files: list[str]) -> Plan:
    if len(files) != 1:
        raise InputError("llmc plan show takes one PLAN file; to plan for a model in a folder show, name ./show")
    return Plan.load(files[0])


def _evaluate(files: list[str], flags: PlanningFlags, plot: Path | None, *, as_json: bool) -> None:
    from llmc.buckets.evaluation_text import comparison_text, range_text, text

    if not files:
        raise InputError(
            "llmc plan evaluate takes PLAN files; to plan for a model in a folder evaluate, name ./evaluate"
        )
    plans = [(file, Plan.load(file)) for file in files]
    found = [(name, *_replay(made, flags)) for name, made in plans]
    output_bars.close_bars()
    if plot is not None:
        _plot(plot, plans, flags, [])
    if as_json:
        documents = [
            {"plan": name, **evaluation.to_dict(), "traffic": counts, **({"waste_range": wastes} if wastes else {})}
            for name, evaluation, counts, _, wastes in found
        ]
        typer.echo(json.dumps(documents[0] if len(documents) == 1 else {"plans": documents}))
        return
    for note in dict.fromkeys(note for one in found for note in one[3]):
        typer.echo(note, err=True)
    if len(found) == 1:
        typer.echo(text(found[0][1]), nl=False)
    else:
        typer.echo(comparison_text([(name, evaluation) for name, evaluation, *_ in found]), nl=False)
    for name, evaluation, _, _, wastes in found:
        if wastes:
            typer.echo(range_text(name if len(found) > 1 else "", evaluation, wastes), nl=False)


def _replay(
    made: Plan, flags: PlanningFlags
) -> tuple[Evaluation, dict[str, int], list[str], dict[str, tuple[float, float]]]:
    """What the plan does, counts and notes of the traffic, and where lengths are uncertain the range of each waste."""
    from llmc.buckets.replay import replay, waste_ranges

    traffic = open_traffic(flags, "judge the plan")
    found = replay(made, traffic)
    ends = [open_traffic(flags, "judge the plan", end) for end in UNCERTAIN] if traffic.uncertain else []
    return found, traffic.counts(), traffic.notes(), waste_ranges(made, found, ends)


def _frontier(flags: PlanningFlags, model: str | None, config: str | None) -> list[FrontierPoint]:
    from llmc.compiler.pipeline.planning import frontier_for

    return frontier_for(**planning_arguments(flags, model, config))


def _plot(path: Path, plans: list[tuple[str, Plan]], flags: PlanningFlags, points: list[FrontierPoint]) -> None:
    from llmc.buckets.plots import draw

    draw(path, plans, open_traffic(flags, "draw") if flags.traffic is not None else None, points)
    output_bars.close_bars()
    typer.echo(f"wrote {path}", err=True)


def _print(made: Plan, points: list[FrontierPoint], *, as_json: bool) -> None:
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


def _estimates(
    made: Plan, model: str | None, options: CompileOptions, named: bool, flags: PlanningFlags, bundle: Path | None
) -> str:
    """The cost of compiling the plan, if the model's sizes are known; `named`: the user asked for it."""
    if model is None:
        return ""
    from llmc.compiler.estimates.footprint import Footprint
    from llmc.settings import Settings

    try:
        settings = Settings.from_environment()
        footprint = Footprint.open(
            model, made.limits, options.device, settings, flags.bench, bundle, options, made.provenance.facts
        )
    except CheckpointError:
        if not named:
            return ""
        raise
    return footprint.text(made.buckets)
