"""`llmc plan hybrid`, also written `llmc plan --hybrid`: whether prompts on one device and decode on another pays."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli import output
from llmc.cli.options import fields_option, option, traffic_format_option
from llmc.cli.output import echo
from llmc.cli.planning import PlanningFlags, open_traffic
from llmc.cli.quantities import size
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.buckets.hybrid.device import Stage
    from llmc.buckets.traffic.events import TrafficRequest

REQUESTS = 256
"""Requests of one length that are simulated without recorded ones."""
MOST_REQUESTS = 20_000
_VALUE_BYTES = 4
"""Keys and values are handed over as float32 unless --kv-bytes-per-token says (runtime/engine/handover.py)."""


def register(group: typer.Typer) -> None:
    """Add the command to `group`."""
    group.command("hybrid")(hybrid)


def hybrid(
    *,
    prefill_bench: Annotated[
        str, option("--prefill-bench", "FILE", "Measured seconds of the device for prompts (llmc bench -o).")
    ],
    decode_bench: Annotated[
        str, option("--decode-bench", "FILE", "Measured seconds of the device for decode steps (llmc bench -o).")
    ],
    gb_per_s: Annotated[
        float, option("--gb-per-s", "R", "Keys and values handed over, 10⁹ bytes a second, export and import included.")
    ],
    latency_ms: Annotated[float, option("--latency-ms", "T", "Of the transport, for each prompt.")] = 0.0,
    model: Annotated[
        str | None,
        option("--model", "MODEL", "What a token's keys and values take: a model or config.json."),
    ] = None,
    kv_bytes_per_token: Annotated[str | None, option("--kv-bytes-per-token", "SIZE", "The same, as a number.")] = None,
    traffic: Annotated[
        str | None, option("--traffic", "FILE", "Recorded requests, in any format of docs/traffic.md.")
    ] = None,
    traffic_format: Annotated[str | None, traffic_format_option()] = None,
    fields: Annotated[str | None, fields_option()] = None,
    arrival_rate: Annotated[
        str | None, option("--arrival-rate", "R", "Requests a second, or inf. Default: as recorded; else inf.")
    ] = None,
    prompt_len: Annotated[
        int | None, option("--prompt-len", "N", "Prompt tokens, in place of --traffic.", min=1)
    ] = None,
    output_len: Annotated[int | None, option("--output-len", "N", "Output tokens, beside --prompt-len.", min=1)] = None,
    max_num_seqs: Annotated[int, option("--max-num-seqs", "N", "Sequences in flight.", min=1)] = 8,
    max_model_len: Annotated[int, option("--max-model-len", "N", "Longest sequence.", min=2)] = 8192,
    step_overhead_ms: Annotated[
        float, option("--step-overhead-ms", "T", "The engine's time around each step (sampling, scheduling).")
    ] = 0.0,
    same_host: Annotated[
        bool, typer.Option("--same-host", help="Both run on the same cores: their times add up, and do not overlap.")
    ] = False,
    contention: Annotated[
        float, option("--contention", "F", "With --same-host: times that two steps at once take, over their sum.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the report.")] = False,
) -> None:
    """Say whether a hybrid pays: prompts on one device, decode on the other, against the better of the two alone.

    Nothing is run: requests are simulated with measured times of steps. The report has throughput, time to first token,
    what the hand-over costs, and from which lengths on it pays (docs/planning.md).

    \b
    Example:
      llmc plan --hybrid --prefill-bench x.json --decode-bench y.json --gb-per-s 3 --model smollm2-demo
        --traffic requests.csv
      llmc plan hybrid --prefill-bench x.json --decode-bench y.json --gb-per-s 3 --kv-bytes-per-token 45KiB
        --prompt-len 1024 --output-len 64 --same-host
    """
    from llmc.buckets.hybrid.comparison import compare
    from llmc.buckets.hybrid.device import Link, Sharing

    if contention != 1.0 and not same_host:
        raise InputError("--contention is of two devices on the same cores; give --same-host too")
    prefill, decode = (_stage(file, step_overhead_ms) for file in (prefill_bench, decode_bench))
    flags = PlanningFlags(
        traffic=traffic, traffic_format=traffic_format, fields=fields, arrival_rate=arrival_rate, clip=True
    )
    found = compare(
        _requests(flags, prompt_len, output_len, max_model_len, max_num_seqs), prefill, decode,
        Link(_token_bytes(model, kv_bytes_per_token), gb_per_s, latency_ms / 1e3), max_num_seqs,
        Sharing(same_host, contention), max_model_len,
    )  # fmt: skip
    echo(json.dumps(found.to_dict()) if as_json else found.text(), nl=as_json)


def _stage(file: str, overhead_ms: float) -> Stage:
    from llmc.buckets.cost.bench import Bench
    from llmc.buckets.hybrid.device import Stage
    from llmc.buckets.traffic.step_time import BenchStepTime

    bench = Bench.load(file)
    for phase in ("prompt", "decode"):
        if not any(one.bucket.phase == phase for one in bench.measurements):
            raise InputError(f"{file}: no {phase} step was measured, and each device is compared alone too")
    return Stage(bench.device, BenchStepTime(bench.rising()), overhead_ms / 1e3)


def _token_bytes(model: str | None, given: str | None) -> int:
    if (model is None) == (given is None):
        raise InputError("say what a token's keys and values take with --model or --kv-bytes-per-token, one of them")
    if model is None:
        return size("--kv-bytes-per-token", given) or 0
    from llmc.compiler.architectures.shared.caches import cache_of
    from llmc.compiler.checkpoint import read_config

    return cache_of(read_config(model)).token_values * _VALUE_BYTES


def _requests(
    flags: PlanningFlags, prompt: int | None, answer: int | None, longest: int, slots: int
) -> list[TrafficRequest]:  # fmt: skip
    """Those recorded, clipped to the longest sequence; or REQUESTS of one length."""
    from llmc.buckets.limits import Limits
    from llmc.buckets.traffic.events import TrafficRequest

    if (flags.traffic is None) == (prompt is None) or (prompt is None) != (answer is None):
        raise InputError("give --traffic FILE, or --prompt-len and --output-len")
    if prompt is not None and answer is not None:
        if prompt + answer > longest:
            raise InputError(f"{prompt} and {answer} tokens are more than --max-model-len {longest}")
        if flags.arrival_rate not in (None, "inf"):
            raise InputError("--arrival-rate is of recorded requests; equal ones all arrive at once")
        return [TrafficRequest(0.0, prompt, answer)] * REQUESTS
    source = open_traffic(flags, "simulate")
    found = list(itertools.islice(source.requests(Limits(longest, slots)), MOST_REQUESTS + 1))
    output.close_bars()
    for note in source.notes():
        echo(note, err=True)
    if len(found) > MOST_REQUESTS:
        echo(f"simulated: the first {MOST_REQUESTS:,} requests", err=True)
    return found[:MOST_REQUESTS]
