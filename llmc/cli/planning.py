"""The planning flags, which every command that plans shares, and the plan they ask for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmc.buckets.limits import DEFAULT_BLOCK_SIZE, DEFAULT_MAX_NUM_SEQS
from llmc.buckets.plan import Plan
from llmc.buckets.strategies import DEFAULT_STRATEGY, names
from llmc.buckets.strategies.base import Range
from llmc.cli.flags import Command, takes
from llmc.cli.options import fields_option, option, traffic_format_option
from llmc.cli.output import ReadingProgress
from llmc.cli.quantities import duration, fraction, rate, size
from llmc.errors import InputError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.buckets.traffic.length_histogram import End
    from llmc.buckets.traffic.source import Traffic
    from llmc.compiler.checkpoint import Checkpoint
    from llmc.compiler.options import CompileOptions

_LIMITS, _BUCKETS, _TRAFFIC, _BUDGETS = "Limits", "Buckets", "Traffic", "Budgets"
_RANGE = "MIN,STEP,MAX"
_RANGES = ("prompt_batch", "prompt_seq", "prompt_context", "decode_batch", "decode_seq")
_REPLAY = ("arrival_rate", "clip", "traffic_format", "fields")
"""Flags about --traffic, which the traffic itself carries on."""


def _option(metavar: str, text: str, panel: str | None = None) -> Any:
    return option("", metavar, text, rich_help_panel=panel)


@dataclass(frozen=True)
class PlanningFlags:
    """The planning flags as typed; None is a flag that was not given. Ranges are "MIN,STEP,MAX"."""

    max_model_len: Annotated[
        int | None, _option("N", "Tokens of one sequence, prompt and answer. Default: what the model config says.")
    ] = None
    max_num_seqs: Annotated[int | None, _option("N", f"Sequences in flight. Default: {DEFAULT_MAX_NUM_SEQS}.")] = None
    traffic: Annotated[
        str | None,
        _option("FILE", "Recorded requests, in any format of docs/traffic.md: choose the buckets that pad them least."),
    ] = None
    max_graphs: Annotated[int | None, _option("N", "Buckets of each phase at most. Default with --traffic: 32.")] = None
    max_prompt_len: Annotated[
        int | None, _option("N", "Tokens of the longest prompt. Default: max-model-len - 1.", _LIMITS)
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, _option("N", "Padded new tokens of one prompt step. Default: no limit.", _LIMITS)
    ] = None
    block_size: Annotated[
        int | None, _option("N", f"Tokens of one KV cache block. Default: {DEFAULT_BLOCK_SIZE}.", _LIMITS)
    ] = None
    max_seq_len_to_capture: Annotated[
        int | None, _option("N", "Lengths above N get only the buckets that coverage needs.", _LIMITS)
    ] = None
    strategy: Annotated[
        str | None,
        _option("NAME", f"How to choose values: {', '.join(names())}. Default: {DEFAULT_STRATEGY}.", _BUCKETS),
    ] = None
    prompt_batch: Annotated[str | None, _option(_RANGE, "Prompts of one prompt step.", _BUCKETS)] = None
    prompt_seq: Annotated[str | None, _option(_RANGE, "New tokens of each prompt in a step.", _BUCKETS)] = None
    prompt_context: Annotated[
        str | None,
        _option(
            _RANGE,
            "Cached tokens before them, for chunked prompts and reused prefixes. Default: 0 where prompts fit a step.",
            _BUCKETS,
        ),
    ] = None
    decode_batch: Annotated[str | None, _option(_RANGE, "Sequences of one decode step.", _BUCKETS)] = None
    decode_seq: Annotated[str | None, _option(_RANGE, "Cached tokens of each of them.", _BUCKETS)] = None
    context_unit: Annotated[
        str | None,
        _option(
            "tokens|blocks",
            "What contexts are counted in, in ranges and in --from-file. Default: tokens; of a file, what its numbers "
            "say (vLLM's bucket files count blocks).",
            _BUCKETS,
        ),
    ] = None
    from_file: Annotated[
        str | None, _option("FILE", "Buckets as lines of (batch, query, context), lists and ranges allowed.", _BUCKETS)
    ] = None
    traffic_format: Annotated[str | None, traffic_format_option(rich_help_panel=_TRAFFIC)] = None
    fields: Annotated[str | None, fields_option(rich_help_panel=_TRAFFIC)] = None
    arrival_rate: Annotated[
        str | None, _option("R", "Requests per second to replay them at, or inf. Default: as recorded.", _TRAFFIC)
    ] = None
    clip: Annotated[
        bool,
        typer.Option(
            "--clip", help="Clip requests above the limits, in place of leaving them out.", rich_help_panel=_TRAFFIC
        ),
    ] = False
    bench: Annotated[
        str | None,
        _option("FILE", "Measured seconds of buckets (llmc bench -o): what steps cost, in place of tokens.", _TRAFFIC),
    ] = None
    max_waste: Annotated[
        str | None, _option("F", "As few buckets as add at most this much padding, e.g. 10%.", _BUDGETS)
    ] = None
    max_compile_time: Annotated[str | None, _option("T", "Estimated compile time at most, e.g. 30m.", _BUDGETS)] = None
    max_graph_memory: Annotated[
        str | None, _option("SIZE", "Estimated memory of all graphs at most, e.g. 8GiB.", _BUDGETS)
    ] = None

    def given(self) -> list[str]:
        """The flags that were given, spelled as on the command line."""
        return [f"--{flag.name.replace('_', '-')}" for flag in fields(self) if getattr(self, flag.name) != flag.default]


def takes_planning_flags(command: Command) -> Command:
    """`command`, whose parameter `flags` is a PlanningFlags, as a command line function with one option for each."""
    return takes(PlanningFlags, command)


def plan_from_flags(
    flags: PlanningFlags,
    model: str | Checkpoint | None = None,
    config: str | None = None,
    settings: Settings | None = None,
    device: str | None = None,
    options: CompileOptions | None = None,
) -> Plan:
    """The plan for a checkpoint (`model`), a model config alone (`config`), or --max-model-len by itself.

    `settings` defaults to the environment. A budget counts the compile times and graph memory of `device`, compiled
    with `options`. Raises InputError for flags that cannot be used, a length that the model's positions do not reach,
    or no length at all; CheckpointError when the model cannot be read.
    """
    from llmc.compiler.pipeline.planning import plan_for

    return plan_for(**planning_arguments(flags, model, config), settings=settings, device=device, options=options)


def planning_arguments(flags: PlanningFlags, model: str | Checkpoint | None, config: str | None) -> dict[str, Any]:
    """The flags as `planning.plan_for` takes them. Raises InputError for text that does not parse."""
    if model is not None and config is not None:
        raise InputError("MODEL and --config were both given; give one of them")
    if flags.traffic is None:
        for name in flags.given():
            if name.removeprefix("--").replace("-", "_") in _REPLAY:
                raise InputError(f"{name} says how --traffic is read or replayed: give --traffic FILE")
    as_typed = {flag.name: getattr(flags, flag.name) for flag in fields(flags) if flag.name not in _REPLAY}
    return {
        **as_typed,
        **{name: _range(f"--{name.replace('_', '-')}", as_typed[name]) for name in _RANGES},
        "model": model if model is not None else config,
        "traffic": None if flags.traffic is None else open_traffic(flags),
        "max_waste": fraction("--max-waste", flags.max_waste),
        "max_compile_time": duration("--max-compile-time", flags.max_compile_time),
        "max_graph_memory": size("--max-graph-memory", flags.max_graph_memory),
    }


def not_a_file(url: str) -> str:
    """What to do with a URL in place of a file of traffic."""
    return (
        f"--traffic {url} is no file: sample it first, llmc traffic show {url} --for 10m -o sampled.prom, and give "
        "that file"
    )


def open_traffic(flags: PlanningFlags, then: str = "choose buckets", end: End = "middle") -> Traffic:
    """The recorded requests that the flags name, with a bar that says what comes `then`; `end`: see `Trace`."""
    from llmc.buckets.cost.bench import Bench
    from llmc.buckets.traffic.formats.fields import parse
    from llmc.buckets.traffic.formats.prometheus.live import is_url
    from llmc.buckets.traffic.source import Traffic

    if flags.traffic is None:
        raise InputError("name the recorded requests with --traffic FILE")
    if is_url(flags.traffic):
        raise InputError(not_a_file(flags.traffic))
    bench = None if flags.bench is None else Bench.load(flags.bench)
    return Traffic(
        flags.traffic, rate("--arrival-rate", flags.arrival_rate), clip=flags.clip, bench=bench,
        format=flags.traffic_format, fields=None if flags.fields is None else parse(flags.fields), end=end,
        progress=ReadingProgress(f"replay {flags.traffic}", then),
    )  # fmt: skip


def _range(flag: str, text: str | None) -> Range | None:
    if text is None:
        return None
    try:
        return Range.of(flag, [int(number) for number in text.split(",")])
    except ValueError:
        raise InputError(f"{flag} {text!r} is not {_RANGE}, three whole numbers such as 1,32,64") from None
