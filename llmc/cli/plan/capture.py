"""`llmc plan capture PLAN`: which graphs a device's memory holds, before there is a device."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.buckets.plan import Plan
from llmc.cli import output
from llmc.cli.capturing import UNCAPTURED_SHOWN, CaptureFlags, takes_capture_flags
from llmc.cli.grouped_help import GroupedCommand
from llmc.cli.options import device_option, option
from llmc.cli.output import echo
from llmc.cli.quantities import size
from llmc.errors import InputError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.capture.graphs import Attempt
    from llmc.buckets.capture.predict import SizeOf
    from llmc.compiler.estimates.footprint import Footprint


def register(group: typer.Typer) -> None:
    """Add the command to `group`."""
    group.command("capture", cls=GroupedCommand)(takes_capture_flags(capture))


def capture(
    file: Annotated[str, typer.Argument(metavar="PLAN", help="A plan of llmc plan -o.", show_default=False)],
    *,
    flags: CaptureFlags,
    device_memory: Annotated[str, option("--device-memory", "SIZE", "All memory of the device, e.g. 96GiB.")],
    model: Annotated[
        str | None, option("--model", "MODEL", "Estimate from this model: a folder, .gguf, hub name or config.json.")
    ] = None,
    device: Annotated[str, device_option("--device", "The device to estimate --model for.")] = "hpu",
    dtype: Annotated[str, option("--dtype", "f32|bf16|f16", "What --model's weights are held in.")] = "bf16",
    bench: Annotated[str | None, option("--bench", "FILE", "Graphs as measured by llmc bench -o.")] = None,
    weight_memory: Annotated[str | None, option("--weight-memory", "SIZE", "What weights take.")] = None,
    profile_memory: Annotated[
        str, option("--profile-memory", "SIZE", "What a run of dummy data takes beside weights.")
    ] = "0",
    kv_bytes_per_token: Annotated[
        str | None, option("--kv-bytes-per-token", "SIZE", "Keys and values of one token, all layers.")
    ] = None,
    graph_bytes_per_token: Annotated[
        str | None, option("--graph-bytes-per-token", "SIZE", "Memory of a graph for each new token of its bucket.")
    ] = None,
    traffic: Annotated[
        str | None, option("--traffic", "FILE", "Recorded requests: how many of their steps replay a graph.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the report.")] = False,
) -> None:
    """Say which graphs of a plan a device of that memory captures at start, and how large its KV cache becomes.

    Nothing is run: sizes are estimates for --model, or what a server's log said. The rules are the Gaudi guide's
    (docs/warmup.md).

    \b
    Example:
      llmc plan capture plan.json --device-memory 96GiB --model config.json
      llmc plan capture plan.json --device-memory 94.62GiB --weight-memory 14.97GiB --profile-memory 504MiB
        --kv-bytes-per-token 128KiB --graph-bytes-per-token 1.44MiB --graph-reserved-mem 40%
    """
    from llmc.buckets.capture.dry_run import dry_run
    from llmc.buckets.capture.log import Lines, budget_line, to_dict, uncaptured_lines
    from llmc.buckets.capture.memory import Memory

    made, settings = Plan.load(file), Settings.from_environment()
    options = flags.choice(settings).options
    weights, token = size("--weight-memory", weight_memory), size("--kv-bytes-per-token", kv_bytes_per_token)
    graph = size("--graph-bytes-per-token", graph_bytes_per_token)
    footprint = None if model is None else _footprint(model, made, device, dtype, bench, settings)
    limits = made.limits
    block = None if token is None else token * limits.block_size
    if footprint is not None:
        weights = footprint.weight_bytes if weights is None else weights
        share = -(-footprint.sequence_bytes * limits.block_size // limits.max_model_len)
        block = share if block is None else block
    if weights is None or not block or (graph is None and footprint is None):
        raise InputError(
            "sizes are missing: give --model MODEL to estimate them, or --weight-memory, --kv-bytes-per-token and "
            "--graph-bytes-per-token, all as a server logged them"
        )
    size_of = _sizes(graph, footprint)
    lines = Lines.of(made.buckets, limits.block_size)
    memory = Memory(
        size("--device-memory", device_memory) or 0, weights, size("--profile-memory", profile_memory) or 0,
        block, limits.block_size, limits.max_model_len, options,
    )  # fmt: skip

    def tell(attempt: Attempt) -> None:
        if output.verbose:
            echo(lines.captured(attempt), err=True)

    outcome = dry_run(made.buckets, memory, size_of, tell)
    steps = {} if traffic is None else _steps(made, traffic)
    shares = {phase.phase: phase.steps_captured(steps) for phase in outcome.phases}
    if as_json:
        found = {"memory": memory.to_dict(), **to_dict(outcome)}
        echo(json.dumps(found if traffic is None else {**found, "steps_captured": shares}))
        return
    echo(memory.text(outcome.used))
    echo(budget_line(outcome, options))
    for phase in outcome.phases:
        echo(lines.summary(phase))
    if traffic is not None:
        told = [f"{share:.1%} of {phase} steps" for phase, share in shares.items() if share is not None]
        echo(f"{traffic}: {' and '.join(told)} replay a graph")
    for line in uncaptured_lines(outcome, lines, None if output.verbose else UNCAPTURED_SHOWN):
        echo(line)


def _footprint(model: str, made: Plan, device: str, dtype: str, bench: str | None, settings: Settings) -> Footprint:
    from llmc.compiler.estimates.footprint import Footprint
    from llmc.compiler.options import CompileOptions

    options = CompileOptions(device, dtype=dtype)
    return Footprint.open(model, made.limits, device, settings, bench=bench, options=options)


def _steps(made: Plan, traffic: str) -> dict[Bucket, int]:
    """How often recorded requests run each bucket."""
    from llmc.buckets.evaluation.replay import replay
    from llmc.cli.planning import PlanningFlags, open_traffic

    requests = open_traffic(PlanningFlags(traffic=traffic), "count the steps of each bucket")
    found = replay(made, requests)
    output.close_bars()
    for note in requests.notes():
        echo(note, err=True)
    return {use.bucket: use.steps for phase in (found.prompt, found.decode) for use in phase.buckets}


def _sizes(each: int | None, footprint: Footprint | None) -> SizeOf:
    """Bytes of a bucket's graph: `each` byte of a new token, or as estimated."""
    if each is not None or footprint is None:
        return lambda bucket: (each or 0) * bucket.tokens
    return lambda bucket: footprint.graph_bytes([bucket])
