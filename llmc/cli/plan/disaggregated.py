"""`llmc plan disaggregated`, or `llmc plan --disaggregated`: whether disaggregated prefill and decode pay off."""

from __future__ import annotations

import itertools
import json
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING

from llmc.cli import output
from llmc.cli.options import Command, fields_flag, flag, switch, traffic_format_flag
from llmc.cli.output import echo
from llmc.cli.planning import traffic_of
from llmc.cli.quantities import size
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.buckets.disaggregated.device import Stage
    from llmc.buckets.traffic.events import TrafficRequest

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
        """The recorded requests, clipped to the longest sequence; or REQUESTS of one length."""
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
        output.close_bars()
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
