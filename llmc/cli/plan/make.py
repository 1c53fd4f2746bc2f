"""`llmc plan MODEL`: make a plan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.buckets.plan import Plan
from llmc.cli.options import (
    DTYPE_CHOICES,
    Command,
    DeviceOptions,
    argument,
    device_flag,
    flag,
    one_of,
    quantize_flag,
    switch,
    task_flag,
)
from llmc.cli.output import close_bars, echo
from llmc.cli.planning import PlanningFlags
from llmc.errors import CheckpointError, InputError, did_you_mean
from llmc.files import read_text
from llmc.json_fields import Fields
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.buckets.encoding import EncodePlan
    from llmc.buckets.planner.choice import FrontierPoint
    from llmc.buckets.traffic.source import Traffic
    from llmc.compiler.options import CompileOptions


VERBS = ("show", "evaluate", "export", "import", "tune", "check", "capture")
_ESTIMATES, _SHOWN = "Estimates", "Also shown"


@dataclass(frozen=True, kw_only=True)
class PlanMakeCommand(DeviceOptions, PlanningFlags):
    """Choose the buckets to compile and explain the choice. Nothing is compiled.

    A bucket is a batch size with a token count; its graph serves every request that fits. Every plan covers every
    request within its limits; the report lists what that adds to your ranges or drops from them. For other servers use
    llmc plan tune, export or check with --server NAME.

    \b
    Example:
      llmc plan ./SmolLM2-135M-Instruct --max-model-len 2048 --max-num-seqs 4 -o plan.json
      llmc plan --config config.json --prompt-batch 1,32,4 --prompt-seq 128,128,1024
      llmc plan --config config.json --traffic requests.csv --max-graphs 24 --plot plan.html -o plan.json
      llmc plan show plan.json
      llmc plan evaluate plan.json other.json --traffic requests.csv
      llmc plan tune --server vllm --traffic requests.csv --max-model-len 8192 --max-num-seqs 128 -o configuration
    """

    brief = True

    words: list[str] | None = argument(
        " | ".join(("MODEL", *VERBS)),
        "A model folder (./show if it is named like a verb), .gguf file or hub name; or a verb with its own --help.",
        default=None,
        autocompletion=one_of(lambda: VERBS),
    )
    device: str | None = device_flag(None, "Estimate compile time and memory for this device. Default with MODEL: cpu.")
    quantize: str | None = quantize_flag("Estimate with this weight format.")
    config: str | None = flag(None, "FILE", "A config.json, instead of MODEL.")
    output: str | None = flag(None, "FILE", "Write the plan here as JSON.", names="--output -o")
    as_json: bool = switch("--json", "Print JSON instead of the report.")
    dtype: str | None = flag(None, DTYPE_CHOICES, "Estimate with this precision of unquantized values.", _ESTIMATES)
    bundle: Path | None = flag(
        None, "BUNDLE", "Estimate from the weights and compile times of this bundle.", _ESTIMATES
    )
    frontier: bool = switch("--frontier", "Also print padding for each number of graphs.", _SHOWN)
    plot: Path | None = flag(None, "OUT", "Draw the plan: a .png, or a self-contained .html.", _SHOWN)
    server: str | None = flag(None, "NAME", "Also print the plan in this server's format (llmc plan export).", _SHOWN)
    task: str | None = task_flag()

    def run(self) -> None:
        from llmc.compiler.options import CompileOptions, flag_of
        from llmc.compiler.pipeline.planning import frontier_for, plan_for

        arguments = self.words or []
        priced: dict[str, object] = {
            "--device": self.device,
            "--bundle": self.bundle,
            "--quantize": self.quantize,
            "--dtype": self.dtype,
            **{flag_of(name): value for name, value in self.own.items()},
        }
        named = any(given is not None for given in priced.values())
        estimates = ""
        if len(arguments) > 1:
            requested = f"llmc plan takes one MODEL, not {len(arguments)}: {' '.join(arguments)}"
            raise InputError(requested + did_you_mean(arguments[0], VERBS))
        model = arguments[0] if arguments else None
        for name, given in priced.items():
            if given is not None and model is None and self.config is None:
                raise InputError(f"{name} is for estimates, which need a model: give MODEL or --config FILE")
        if model is not None and self.config is not None:
            raise InputError("MODEL and --config were both given; give one of them")
        if model is not None and (pooled := self._to_encode(model)) is not None:
            if self.output is not None:
                pooled.save(self.output)
                echo(f"wrote {self.output}", err=True)
            echo(pooled.to_json() if self.as_json else pooled.text())
            return
        options = CompileOptions(self.device or "cpu", self.quantize, self.dtype or "auto", own=self.own)
        source = model if model is not None else self.config
        built = plan_for(source, **self.arguments(), device=self.device, options=options)
        points = frontier_for(source, **self.arguments()) if self.frontier else []
        if named or not self.as_json:
            estimates = self._estimates(built, source, options, named)
        close_bars()
        if self.output is not None:
            built.save(self.output)
            echo(f"wrote {self.output}", err=True)
        if self.plot is not None:
            drawn = None if self.traffic is None else self.open_traffic("draw")
            draw_to(self.plot, [(self.output or "plan", built)], drawn, points)
        if self.server is not None:
            print_for_server(built, self.server, as_json=self.as_json)
            return
        print_plan(built, points, as_json=self.as_json)
        if estimates and not self.as_json:
            echo("\n" + estimates, nl=False)

    def _to_encode(self, model: str) -> EncodePlan | None:
        """None if the checkpoint generates or has no weights."""
        from llmc.compiler.checkpoint import open_checkpoint
        from llmc.compiler.pipeline.encoding import encoder_plan_of, settled_task

        try:
            checkpoint = open_checkpoint(model)
            task = settled_task(checkpoint, self.task)
            return None if task is None else encoder_plan_of(checkpoint, task, None, self.arguments_to_encode(task))
        except CheckpointError:
            if self.task is not None:
                raise
            return None

    def _estimates(self, built: Plan, model: str | None, options: CompileOptions, named: bool) -> str:
        """Empty if the model's sizes are unknown and the user has not requested estimates (`named`)."""
        if model is None:
            return ""
        from llmc.compiler.estimates.footprint import Footprint

        try:
            settings = Settings.from_environment()
            footprint = Footprint.open(
                model, built.limits, options.device, settings, self.bench, self.bundle, options, built.provenance.facts
            )
        except CheckpointError:
            if not named:
                return ""
            raise
        return footprint.text(built.buckets)


@dataclass(frozen=True, kw_only=True)
class PlanShowCommand(Command):
    """Print a plan file.

    \b
    Example:
      llmc plan show plan.json
      llmc plan show plan.json --plot plan.html
    """

    files: list[str] | None = argument("PLAN", "A plan file written by llmc plan -o.", default=None)
    plot: Path | None = flag(None, "OUT", "Draw the plan: a .png, or a self-contained .html.")
    output: str | None = flag(None, "FILE", "Write the plan here as JSON.", names="--output -o")
    as_json: bool = switch("--json", "Print JSON instead of the report.")

    def run(self) -> None:
        if not self.files or len(self.files) != 1:
            raise InputError("llmc plan show takes one PLAN file; for a model in a folder named show, write ./show")
        text = read_text(self.files[0], "plan")
        if "task" in Fields.parse(text, self.files[0]).names():
            from llmc.buckets.encoding import EncodePlan

            _show_pooled(EncodePlan.from_json(text, self.files[0]), self.plot, self.output, self.as_json)
            return
        built = Plan.from_json(text, self.files[0])
        if self.output is not None:
            built.save(self.output)
            echo(f"wrote {self.output}", err=True)
        if self.plot is not None:
            draw_to(self.plot, [(self.files[0], built)], None, [])
        print_plan(built, [], as_json=self.as_json)


def _show_pooled(built: EncodePlan, plot: Path | None, output: str | None, as_json: bool) -> None:
    if plot is not None:
        raise InputError(f"--plot draws plans for text generation, but this one is to {built.task}; leave it out")
    if output is not None:
        built.save(output)
        echo(f"wrote {output}", err=True)
    echo(built.to_json() if as_json else built.text())


def draw_to(path: Path, plans: list[tuple[str, Plan]], traffic: Traffic | None, points: list[FrontierPoint]) -> None:
    """Draw the plans to `path`, with the traffic on them."""
    from llmc.buckets.report.plan_page import draw

    draw(path, plans, traffic, points)
    close_bars()
    echo(f"wrote {path}", err=True)


def print_plan(built: Plan, points: list[FrontierPoint], *, as_json: bool) -> None:
    """Print the report on a plan, or its JSON, with the frontier if there is one."""
    if not as_json:
        from llmc.buckets.report.text import frontier_text, plan_text

        echo(plan_text(built), nl=False)
        if points:
            echo("\n" + frontier_text(points), nl=False)
        return
    for note in built.provenance.notes:
        if note.kind == "warning":
            echo(str(note), err=True)
    if points:
        echo(json.dumps({"plan": built.to_dict(), "frontier": [point.to_dict() for point in points]}))
    else:
        echo(built.to_json(), nl=False)


def print_for_server(built: Plan, name: str, *, as_json: bool) -> None:
    """Print the plan in the format of server `name`; what the server drops or adds goes to stderr.

    Raises UnknownNameError listing the known servers, and InputError for limits or lists that the server refuses.
    """
    from llmc.integrations import bucket_rules
    from llmc.integrations import report as reported
    from llmc.integrations.configuration import Configuration, as_text, setup_for

    server = bucket_rules(name)
    setup = setup_for(server, built.limits.to_dict(), {})
    planned = Configuration("plan", setup, server.from_plan(setup, built))
    accepted = planned.accepted(server)
    for note in reported.accepted(planned.name, accepted):
        echo(note, err=True)
    given = server.export(setup, accepted.lists)
    if as_json:
        echo(json.dumps({"plan": built.to_dict(), "environment": dict(given.environment),
                               "arguments": list(given.arguments), "files": dict(given.files)}))  # fmt: skip
    else:
        echo(as_text(given), nl=False, verbatim=True)
