"""`llmc plan MODEL` makes a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.buckets.plan import Plan
from llmc.cli import output as output_bars
from llmc.cli.flags import takes_own_options
from llmc.cli.grouped_help import add
from llmc.cli.options import TaskFlag, device_option, one_of, option
from llmc.cli.output import echo
from llmc.cli.plan.printing import draw_to, print_for_server, print_plan
from llmc.cli.planning import PlanningFlags, open_traffic, plan_from_flags, planning_arguments, takes_planning_flags
from llmc.cli.pooled_planning import pooled_plan
from llmc.compiler.options import Value
from llmc.errors import CheckpointError, InputError, did_you_mean

if TYPE_CHECKING:
    from llmc.buckets.planner.choice import FrontierPoint
    from llmc.compiler.options import CompileOptions

VERBS = ("show", "evaluate", "export", "import", "tune", "check", "capture")
_ESTIMATES, _SHOWN = "Estimates", "Also shown"


def register(group: typer.Typer) -> None:
    """Add the command to `group`, as what `llmc plan` does with anything that is no verb."""
    add(group, "make", takes_own_options(takes_planning_flags(plan)), hidden=True)


def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar=" | ".join(("MODEL", *VERBS)),
            autocompletion=one_of(lambda: VERBS),
            help="A model folder, .gguf file or hub name; or a verb, each with a --help of its own.",
            show_default=False,
        ),
    ] = None,
    *,
    flags: PlanningFlags,
    device: Annotated[
        str | None,
        device_option("--device", "Estimate compile time and memory for this device. Default with MODEL: cpu."),
    ] = None,
    quantize: Annotated[
        str | None, option("--quantize", "none|int8|fp8|int4|keep", "Estimate with weights quantised so.")
    ] = None,
    config: Annotated[str | None, option("--config", "FILE", "A config.json, in place of MODEL.")] = None,
    output: Annotated[str | None, option("--output -o", "FILE", "Write the plan here, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the report.")] = False,
    dtype: Annotated[
        str | None,
        option(
            "--dtype", "auto|f32|bf16|f16", "Estimate with unquantised numbers held so.", rich_help_panel=_ESTIMATES
        ),
    ] = None,
    bundle: Annotated[
        Path | None,
        option(
            "--bundle",
            "BUNDLE",
            "Estimate by the weights and builds of a bundle compiled before.",
            rich_help_panel=_ESTIMATES,
        ),
    ] = None,
    frontier: Annotated[
        bool,
        typer.Option("--frontier", help="Also tabulate waste against the number of graphs.", rich_help_panel=_SHOWN),
    ] = False,
    plot: Annotated[
        Path | None,
        option("--plot", "OUT", "Draw the plan: a .png, or a self-contained .html.", rich_help_panel=_SHOWN),
    ] = None,
    server: Annotated[
        str | None,
        option(
            "--server",
            "NAME",
            "Also print the plan in this server's form, see llmc plan export.",
            rich_help_panel=_SHOWN,
        ),
    ] = None,
    task: TaskFlag = None,
    own: dict[str, Value],
) -> None:
    """Choose the buckets to compile, and report what they are and why. Compiles nothing.

    Every plan covers every request its limits admit; what that adds to the ranges, or drops from them, is reported. A
    model that keeps states and no cached tokens gets buckets of context 0 alone; of a model of experts the report has
    the active parameters too. A model in a folder called show is ./show. For other servers: llmc plan
    tune|export|check --server NAME.

    \b
    Example:
      llmc plan ./SmolLM2-135M-Instruct --max-model-len 2048 --max-num-seqs 4 -o plan.json
      llmc plan --config config.json --prompt-batch 1,32,4 --prompt-seq 128,128,1024
      llmc plan --config config.json --traffic requests.csv --max-graphs 24 --plot plan.html -o plan.json
      llmc plan show plan.json
      llmc plan evaluate plan.json other.json --traffic requests.csv
      llmc plan tune --server vllm --traffic requests.csv --max-model-len 8192 --max-num-seqs 128 -o configuration
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
    estimates = ""
    if len(arguments) > 1:
        asked = f"llmc plan takes one MODEL, not {len(arguments)}: {' '.join(arguments)}"
        raise InputError(asked + did_you_mean(arguments[0], VERBS))
    model = arguments[0] if arguments else None
    for name, given in priced.items():
        if given is not None and model is None and config is None:
            raise InputError(f"{name} estimates what a model costs there: give MODEL or --config FILE")
    if model is not None and (pooled := pooled_plan(model, task, flags)) is not None:
        if output is not None:
            pooled.save(output)
            echo(f"wrote {output}", err=True)
        echo(pooled.to_json() if as_json else pooled.text())
        return
    options = CompileOptions(device or "cpu", quantize, dtype or "auto", own=own)
    made = plan_from_flags(flags, model, config, device=device, options=options)
    points = _frontier(flags, model, config) if frontier else []
    if named or not as_json:
        estimates = _estimates(made, model if model is not None else config, options, named, flags, bundle)
    output_bars.close_bars()
    if output is not None:
        made.save(output)
        echo(f"wrote {output}", err=True)
    if plot is not None:
        draw_to(
            plot, [(output or "plan", made)], None if flags.traffic is None else open_traffic(flags, "draw"), points
        )
    if server is not None:
        print_for_server(made, server, as_json=as_json)
        return
    print_plan(made, points, as_json=as_json)
    if estimates and not as_json:
        echo("\n" + estimates, nl=False)


def _frontier(flags: PlanningFlags, model: str | None, config: str | None) -> list[FrontierPoint]:
    from llmc.compiler.pipeline.planning import frontier_for

    return frontier_for(**planning_arguments(flags, model, config))


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
