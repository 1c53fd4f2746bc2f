"""`llmc plan capture|disaggregated|fleet`: what would happen on devices and fleets that are not here."""

from __future__ import annotations

import itertools
import json
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.buckets.plan import Plan
from llmc.cli import output
from llmc.cli.options import (
    UNCAPTURED_SHOWN,
    CaptureFlags,
    Command,
    argument,
    device_flag,
    duration,
    fields_flag,
    flag,
    size,
    switch,
    traffic_format_flag,
)
from llmc.cli.output import StepProgress, close_bars, echo
from llmc.cli.planning import traffic_of
from llmc.errors import InputError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.capture.graphs import Attempt
    from llmc.buckets.capture.predict import SizeOf
    from llmc.buckets.disaggregated.device import Stage
    from llmc.buckets.traffic.events import TrafficRequest
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
    close_bars()
    for note in requests.notes():
        echo(note, err=True)
    return {use.bucket: use.steps for phase in (found.prompt, found.decode) for use in phase.buckets}


def _sizes(each: int | None, footprint: Footprint | None) -> SizeOf:
    if each is not None or footprint is None:
        return lambda bucket: (each or 0) * bucket.tokens
    return lambda bucket: footprint.graph_bytes([bucket])


REQUESTS = 256
"""Simulated requests of one length, if there is no recording."""
MOST_REQUESTS = 20_000
_VALUE_BYTES = 4
"""Keys and values are transferred as float32 unless --kv-bytes-per-token is given (runtime/engine/kv_transfer.py)."""


@dataclass(frozen=True, kw_only=True)
class PlanDisaggregatedCommand(Command):
    """Estimate whether prefill on one device and decode on another beats the better device alone.

    Nothing runs: requests are simulated with measured step times. The report has throughput, time to first token, the
    cost of KV transfers, and the prompt lengths from which it pays off (docs/planning.md).

    \b
    Example:
      llmc plan --disaggregated --prefill-bench x.json --decode-bench y.json --gb-per-s 3 --model smollm2-demo
        --traffic requests.csv
      llmc plan disaggregated --prefill-bench x.json --decode-bench y.json --gb-per-s 3 --kv-bytes-per-token 45KiB
        --prompt-len 1024 --output-len 64 --same-host
    """

    prefill_bench: str = flag(MISSING, "FILE", "Step times of the prefill device (llmc bench -o).")
    decode_bench: str = flag(MISSING, "FILE", "Step times of the decode device (llmc bench -o).")
    gb_per_s: float = flag(MISSING, "R", "KV transfer rate in GB/s (10⁹ bytes), export and import included.")
    latency_ms: float = flag(0.0, "T", "Transfer latency per prompt.")
    model: str | None = flag(None, "MODEL", "Model or config.json that gives the KV size per token.")
    kv_bytes_per_token: str | None = flag(None, "SIZE", "KV size per token, instead of --model.")
    traffic: str | None = flag(None, "FILE", "Recorded requests, in any format of docs/planning.md.")
    traffic_format: str | None = traffic_format_flag()
    fields: str | None = fields_flag()
    arrival_rate: str | None = flag(None, "R", "Requests per second, or inf. Default: as recorded, else inf.")
    prompt_len: int | None = flag(None, "N", "Prompt tokens, instead of --traffic.", min=1)
    output_len: int | None = flag(None, "N", "Output tokens, with --prompt-len.", min=1)
    max_num_seqs: int = flag(8, "N", "Sequences in flight.", min=1)
    max_model_len: int = flag(8192, "N", "Longest sequence in tokens.", min=2)
    step_overhead_ms: float = flag(0.0, "T", "Engine overhead per step (sampling, scheduling).")
    same_host: bool = switch("--same-host", "Both devices share the same cores, so their times add up.")
    contention: float = flag(1.0, "F", "With --same-host: time of two concurrent steps relative to their sum.")
    as_json: bool = switch("--json", "Print JSON instead of the report.")

    def run(self) -> None:
        from llmc.buckets.disaggregated.comparison import compare
        from llmc.buckets.disaggregated.device import Link, Sharing

        if self.contention != 1.0 and not self.same_host:
            raise InputError("--contention is for two devices on the same cores; add --same-host")
        prefill, decode = (_stage(file, self.step_overhead_ms) for file in (self.prefill_bench, self.decode_bench))
        link = Link(_token_bytes(self.model, self.kv_bytes_per_token), self.gb_per_s, self.latency_ms / 1e3)
        sharing = Sharing(self.same_host, self.contention)
        found = compare(self._requests(), prefill, decode, link, self.max_num_seqs, sharing, self.max_model_len)
        echo(json.dumps(found.to_dict()) if self.as_json else found.text(), nl=self.as_json)

    def _requests(self) -> list[TrafficRequest]:
        from llmc.buckets.limits import Limits
        from llmc.buckets.traffic.events import TrafficRequest

        prompt, answer = self.prompt_len, self.output_len
        if (self.traffic is None) == (prompt is None) or (prompt is None) != (answer is None):
            raise InputError("give --traffic FILE, or --prompt-len and --output-len")
        if prompt is not None and answer is not None:
            if prompt + answer > self.max_model_len:
                raise InputError(
                    f"{prompt} prompt and {answer} output tokens exceed --max-model-len {self.max_model_len}"
                )
            if self.arrival_rate not in (None, "inf"):
                raise InputError("--arrival-rate needs --traffic; requests of --prompt-len all arrive at once")
            return [TrafficRequest(0.0, prompt, answer)] * REQUESTS
        source = traffic_of(
            self.traffic, "simulate", format_=self.traffic_format, names=self.fields, arrival_rate=self.arrival_rate,
            clip=True,
        )  # fmt: skip
        found = list(
            itertools.islice(source.requests(Limits(self.max_model_len, self.max_num_seqs)), MOST_REQUESTS + 1)
        )
        close_bars()
        for note in source.notes():
            echo(note, err=True)
        if len(found) > MOST_REQUESTS:
            echo(f"simulated: the first {MOST_REQUESTS:,} requests", err=True)
        return found[:MOST_REQUESTS]


def _stage(file: str, overhead_ms: float) -> Stage:
    from llmc.buckets.cost.bench import Bench
    from llmc.buckets.disaggregated.device import Stage
    from llmc.buckets.traffic.step_time import BenchStepTime

    bench = Bench.load(file)
    for phase in ("prompt", "decode"):
        if not any(one.bucket.phase == phase for one in bench.measurements):
            raise InputError(
                f"{file}: no {phase} step was measured, but each device is also compared alone; measure both phases"
            )
    return Stage(bench.device, BenchStepTime(bench.rising()), overhead_ms / 1e3)


def _token_bytes(model: str | None, given: str | None) -> int:
    if (model is None) == (given is None):
        raise InputError("give the KV size per token with either --model or --kv-bytes-per-token")
    if model is None:
        return size("--kv-bytes-per-token", given) or 0
    from llmc.compiler.architectures.shared.caches import cache_of
    from llmc.compiler.checkpoint import read_config

    return cache_of(read_config(model)).token_values * _VALUE_BYTES


MOST_NODES = 100_000


@dataclass(frozen=True, kw_only=True)
class PlanFleetCommand(Command):
    """Estimate what a fleet will cost: compile hours, artifact sizes, memory per node and cold starts.

    Cold starts are simulated: up to 10,000 nodes pull a bundle at once through one registry, alone, helped by peers, or
    with a pre-pull. docs/planning.md describes the file and the model.

    \b
    Example:
      llmc plan --fleet fleet.yaml
      llmc plan --fleet fleet.yaml --max-cold-start 2m --plot fleet.html
      llmc plan --fleet fleet.yaml --nodes 50,500,5000 --json
    """

    file: str = argument("FILE", "Models, devices and replicas, as YAML or JSON.")
    max_cold_start: str | None = flag(
        None, "T", "Report from how many nodes on the p99 exceeds this. Default: the file's."
    )
    nodes: str | None = flag(None, "N,N…", "Node counts to simulate. Default: 10,100,1000,10000.")
    plot: Path | None = flag(None, "OUT", "Draw cold starts by node count: a .png, or a self-contained .html.")
    as_json: bool = switch("--json", "Print JSON instead of the report.")

    def run(self) -> None:
        from llmc.fleet.description import cost_of, read
        from llmc.fleet.report import POINTS, plan_fleet

        bound, points = duration("--max-cold-start", self.max_cold_start), _points(self.nodes) or POINTS
        if bound == 0:
            raise InputError("--max-cold-start 0: every start takes longer; give a time above 0")
        described, settings = read(self.file), Settings.from_environment()
        if self.plot is not None:
            from llmc.buckets.render.page import check

            check(self.plot)
        costs = [cost_of(one, settings) for one in described.models]
        with StepProgress("simulate", after=2.0) as progress:
            found = plan_fleet(costs, described.network, bound or described.max_cold_start_s, points, progress)
        if self.plot is not None:
            from llmc.fleet.plot import draw

            draw(self.plot, found)
            echo(f"wrote {self.plot}", err=True)
        echo(json.dumps(found.to_dict()) if self.as_json else found.text(), nl=self.as_json)


def _points(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    words = text.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= MOST_NODES for word in words):
        raise InputError(f"--nodes {text!r} is not a list of numbers from 1 to {MOST_NODES:,}, such as 100,1000")
    return tuple(sorted({int(word) for word in words}))
