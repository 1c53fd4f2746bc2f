"""`llmc plan capture`: predict which graphs fit a device's memory, without the device."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING

from llmc.buckets.plan import Plan
from llmc.cli import output
from llmc.cli.capturing import UNCAPTURED_SHOWN, CaptureFlags
from llmc.cli.options import argument, device_flag, flag, switch
from llmc.cli.output import echo
from llmc.cli.planning import traffic_of
from llmc.cli.quantities import size
from llmc.errors import InputError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.capture.graphs import Attempt
    from llmc.buckets.capture.predict import SizeOf
    from llmc.compiler.estimates.footprint import Footprint


@dataclass(frozen=True, kw_only=True)
class PlanCaptureCommand(CaptureFlags):
    """Predict which graphs of a plan a device with that memory captures at start, and how large its KV cache becomes.

    Nothing runs. Sizes are estimates for --model, or values from a server's log. The rules are those of the Gaudi guide
    (docs/guarantees.md).

    \b
    Example:
      llmc plan capture plan.json --device-memory 96GiB --model config.json
      llmc plan capture plan.json --device-memory 94.62GiB --weight-memory 14.97GiB --profile-memory 504MiB
        --kv-bytes-per-token 128KiB --graph-bytes-per-token 1.44MiB --graph-reserved-mem 40%
    """

    file: str = argument("PLAN", "A plan file written by llmc plan -o.")
    device_memory: str = flag(MISSING, "SIZE", "Total device memory, e.g. 96GiB.")
    model: str | None = flag(None, "MODEL", "Estimate sizes for this model: a folder, .gguf, hub name or config.json.")
    device: str = device_flag("hpu", "The device to estimate --model for.")
    dtype: str = flag("bf16", "f32|bf16|f16", "Precision of --model's weights.")
    bench: str | None = flag(None, "FILE", "Graph measurements of llmc bench -o.")
    weight_memory: str | None = flag(None, "SIZE", "Memory of the weights.")
    profile_memory: str = flag("0", "SIZE", "Memory of a profile run, without weights.")
    kv_bytes_per_token: str | None = flag(None, "SIZE", "KV cache memory per token, all layers.")
    graph_bytes_per_token: str | None = flag(None, "SIZE", "Memory of a graph for each new token of its bucket.")
    traffic: str | None = flag(None, "FILE", "Recorded requests: how many of their steps replay a graph.")
    as_json: bool = switch("--json", "Print JSON in place of the report.")

    def run(self) -> None:
        from llmc.buckets.capture.dry_run import dry_run
        from llmc.buckets.capture.log import CaptureLog, budget_line, to_dict, uncaptured_lines
        from llmc.buckets.capture.memory import Memory
        from llmc.compiler.estimates.footprint import Footprint
        from llmc.compiler.options import CompileOptions

        built, settings = Plan.load(self.file), Settings.from_environment()
        options = self.choice(settings).options
        weights, token = (
            size("--weight-memory", self.weight_memory),
            size("--kv-bytes-per-token", self.kv_bytes_per_token),
        )
        graph = size("--graph-bytes-per-token", self.graph_bytes_per_token)
        footprint = None
        if self.model is not None:
            priced = CompileOptions(self.device, dtype=self.dtype)
            footprint = Footprint.open(
                self.model, built.limits, self.device, settings, bench=self.bench, options=priced
            )
        limits = built.limits
        block = None if token is None else token * limits.block_size
        if footprint is not None:
            weights = footprint.weight_bytes if weights is None else weights
            share = -(-footprint.sequence_bytes * limits.block_size // limits.max_model_len)
            block = share if block is None else block
        if weights is None or not block or (graph is None and footprint is None):
            raise InputError(
                "sizes are missing: give --model MODEL to estimate them, or --weight-memory, --kv-bytes-per-token and "
                "--graph-bytes-per-token from a server's log"
            )
        size_of = _sizes(graph, footprint)
        lines = CaptureLog.of(built.buckets, limits.block_size)
        memory = Memory(
            size("--device-memory", self.device_memory) or 0, weights,
            size("--profile-memory", self.profile_memory) or 0, block, limits.block_size, limits.max_model_len, options,
        )  # fmt: skip

        def on_progress(attempt: Attempt) -> None:
            if output.verbose:
                echo(lines.captured(attempt), err=True)

        outcome = dry_run(built.buckets, memory, size_of, on_progress)
        steps = {} if self.traffic is None else _steps(built, self.traffic)
        shares = {phase.phase: phase.steps_captured(steps) for phase in outcome.phases}
        if self.as_json:
            found = {"memory": memory.to_dict(), **to_dict(outcome)}
            echo(json.dumps(found if self.traffic is None else {**found, "steps_captured": shares}))
            return
        echo(memory.text(outcome.used))
        echo(budget_line(outcome, options))
        for phase in outcome.phases:
            echo(lines.summary(phase))
        if self.traffic is not None:
            reported = [f"{share:.1%} of {phase} steps" for phase, share in shares.items() if share is not None]
            echo(f"{self.traffic}: {' and '.join(reported)} replay a graph")
        for line in uncaptured_lines(outcome, lines, None if output.verbose else UNCAPTURED_SHOWN):
            echo(line)


def _steps(built: Plan, traffic: str) -> dict[Bucket, int]:
    from llmc.buckets.evaluation.replay import replay

    requests = traffic_of(traffic, "count the steps of each bucket")
    found = replay(built, requests)
    output.close_bars()
    for note in requests.notes():
        echo(note, err=True)
    return {use.bucket: use.steps for phase in (found.prompt, found.decode) for use in phase.buckets}


def _sizes(each: int | None, footprint: Footprint | None) -> SizeOf:
    """Graph bytes of a bucket: `each` bytes per new token, or else the estimate."""
    if each is not None or footprint is None:
        return lambda bucket: (each or 0) * bucket.tokens
    return lambda bucket: footprint.graph_bytes([bucket])
