"""The planning flags that all planning commands share, and the plan that they request."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from llmc.buckets.limits import DEFAULT_BLOCK_SIZE, DEFAULT_MAX_NUM_SEQS
from llmc.buckets.plan import Plan
from llmc.buckets.strategies import DEFAULT_STRATEGY, names
from llmc.buckets.strategies.base import Range
from llmc.cli.options import (
    Command,
    clip_flag,
    duration,
    fields_flag,
    flag,
    fraction,
    rate,
    rate_flag,
    size,
    traffic_format_flag,
)
from llmc.cli.output import ReadingProgress
from llmc.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llmc.buckets.bucket import Bucket
    from llmc.buckets.plan import Plan
    from llmc.buckets.traffic.length_histogram import End
    from llmc.buckets.traffic.source import Traffic


_LIMITS, _BUCKETS, _TRAFFIC, _BUDGETS = "Limits", "Buckets", "Traffic", "Budgets"
_RANGE = "MIN,STEP,MAX"
_RANGES = ("prompt_batch", "prompt_seq", "prompt_context", "decode_batch", "decode_seq")
_REPLAY = ("arrival_rate", "clip", "traffic_format", "fields")
"""Flags about --traffic, which are stored in the Traffic object."""


@dataclass(frozen=True, kw_only=True)
class PlanningFlags(Command):
    """Planning flags; None means not given. Ranges are "MIN,STEP,MAX"."""

    max_model_len: int | None = flag(
        None, "N", "Longest sequence in tokens, prompt plus answer. Default: the model config's."
    )
    max_num_seqs: int | None = flag(None, "N", f"Sequences in flight. Default: {DEFAULT_MAX_NUM_SEQS}.")
    traffic: str | None = flag(
        None, "FILE", "Recorded requests (formats: docs/planning.md); choose the buckets that pad them least."
    )
    max_graphs: int | None = flag(None, "N", "Most buckets per phase. Default with --traffic: 32.")
    max_prompt_len: int | None = flag(None, "N", "Longest prompt in tokens. Default: max-model-len - 1.", _LIMITS)
    max_num_batched_tokens: int | None = flag(
        None, "N", "Most new tokens per prefill, padding included. Default: no limit.", _LIMITS
    )
    block_size: int | None = flag(None, "N", f"Tokens of one KV cache block. Default: {DEFAULT_BLOCK_SIZE}.", _LIMITS)
    max_seq_len_to_capture: int | None = flag(
        None, "N", "Lengths above N get only the buckets that coverage needs.", _LIMITS
    )
    strategy: str | None = flag(
        None, "NAME", f"Spacing of bucket sizes: {', '.join(names())}. Default: {DEFAULT_STRATEGY}.", _BUCKETS
    )
    prompt_batch: str | None = flag(None, _RANGE, "Prompts per prefill.", _BUCKETS)
    prompt_seq: str | None = flag(None, _RANGE, "New tokens per prompt in a prefill.", _BUCKETS)
    prompt_context: str | None = flag(
        None,
        _RANGE,
        "Cached tokens before them, for chunked prompts and reused prefixes. Default: 0 if prompts fit one prefill.",
        _BUCKETS,
    )
    decode_batch: str | None = flag(None, _RANGE, "Sequences per decode step.", _BUCKETS)
    decode_seq: str | None = flag(None, _RANGE, "Cached tokens per sequence in a decode step.", _BUCKETS)
    context_unit: str | None = flag(
        None,
        "tokens|blocks",
        "Unit of contexts in ranges and in --from-file. Default: tokens; for a file, derived from its numbers "
        "(vLLM's bucket files count blocks).",
        _BUCKETS,
    )
    from_file: str | None = flag(
        None, "FILE", "File of buckets, one (batch, query, context) a line; lists and ranges are allowed.", _BUCKETS
    )
    traffic_format: str | None = traffic_format_flag(_TRAFFIC)
    fields: str | None = fields_flag(_TRAFFIC)
    arrival_rate: str | None = rate_flag(_TRAFFIC)
    clip: bool = clip_flag(_TRAFFIC)
    bench: str | None = flag(
        None, "FILE", "Measured bucket times (llmc bench -o): weigh steps in seconds instead of tokens.", _TRAFFIC
    )
    max_padding: str | None = flag(
        None, "F", "Use the fewest buckets that add at most this padding, e.g. 10%.", _BUDGETS
    )
    max_compile_time: str | None = flag(None, "T", "Longest estimated compile time, e.g. 30m.", _BUDGETS)
    max_graph_memory: str | None = flag(None, "SIZE", "Most estimated memory for all graphs, e.g. 8GiB.", _BUDGETS)

    def given(self) -> list[str]:
        """The given flags as spelled on the command line."""
        return [
            f"--{flag.name.replace('_', '-')}"
            for flag in fields(PlanningFlags)
            if getattr(self, flag.name) != flag.default
        ]

    def arguments(self) -> dict[str, Any]:
        """Arguments for `pipeline.planning.plan_for`. Raises InputError for text that does not parse."""
        if self.traffic is None:
            for name in self.given():
                if name.removeprefix("--").replace("-", "_") in _REPLAY:
                    raise InputError(f"{name} needs recorded requests: add --traffic FILE")
        as_typed = {one.name: getattr(self, one.name) for one in fields(PlanningFlags) if one.name not in _REPLAY}
        return {
            **as_typed,
            **{name: _range(f"--{name.replace('_', '-')}", as_typed[name]) for name in _RANGES},
            "traffic": None if self.traffic is None else self.open_traffic(),
            "max_padding": fraction("--max-padding", self.max_padding),
            "max_compile_time": duration("--max-compile-time", self.max_compile_time),
            "max_graph_memory": size("--max-graph-memory", self.max_graph_memory),
        }

    def arguments_to_encode(self, task: str) -> dict[str, Any]:
        """Arguments for `pipeline.encoding.encoder_plan_of`. Raises InputError for flags that it does not take."""
        from llmc.buckets.traffic.formats.fields import parse
        from llmc.buckets.traffic.reader import Trace
        from llmc.compiler.pipeline.encoding import LIMITS, OF_TRAFFIC

        taken = {*LIMITS, *((*OF_TRAFFIC, "traffic_format", "fields") if self.traffic else ())}
        others = [flag for flag in self.given() if flag.lstrip("-").replace("-", "_") not in taken]
        if others:
            raise InputError(
                f"a model to {task} is planned by its limits, or by --traffic with --max-graphs; leave out "
                f"{', '.join(others)}"
            )
        found = self.values(*LIMITS)
        if self.traffic is not None:
            names = None if self.fields is None else parse(self.fields)
            found["traffic"] = Trace(self.traffic, format=self.traffic_format, fields=names, generates=False)
            found |= self.values("max_graphs")
        return found

    def open_traffic(self, then: str = "choose buckets") -> Traffic:
        """Open the recorded requests with `traffic_of`."""
        return traffic_of(
            self.traffic, then, format_=self.traffic_format, names=self.fields, arrival_rate=self.arrival_rate,
            clip=self.clip, bench=self.bench,
        )  # fmt: skip


def not_a_file(url: str) -> str:
    """The message for a URL in place of a traffic file."""
    return (
        f"--traffic {url} is a URL, not a file: sample it with llmc traffic show {url} --for 10m -o sampled.prom, and "
        "give that file"
    )


def traffic_of(
    file: str | None, then: str, end: End = "middle", *, format_: str | None = None, names: str | None = None,
    arrival_rate: str | None = None, clip: bool = False, bench: str | None = None,
) -> Traffic:  # fmt: skip
    """Open the recorded requests in `file`. The progress bar ends with `then`, the next activity; `end`: see `Trace`.

    The others are options as typed: --traffic-format, --fields, --arrival-rate, --clip and --bench. Raises InputError.
    """
    from llmc.buckets.cost.bench import Bench
    from llmc.buckets.traffic.formats.fields import parse
    from llmc.buckets.traffic.formats.prometheus.live import is_url
    from llmc.buckets.traffic.source import Traffic

    if file is None:
        raise InputError("name the recorded requests with --traffic FILE")
    if is_url(file):
        raise InputError(not_a_file(file))
    measured = None if bench is None else Bench.load(bench)
    return Traffic(
        file, rate("--arrival-rate", arrival_rate), clip=clip, bench=measured, format=format_,
        fields=None if names is None else parse(names), end=end, progress=ReadingProgress(f"replay {file}", then),
    )  # fmt: skip


def _range(flag: str, text: str | None) -> Range | None:
    if text is None:
        return None
    try:
        return Range.of(flag, [int(number) for number in text.split(",")])
    except ValueError:
        raise InputError(f"{flag} {text!r} is not {_RANGE}, three whole numbers such as 1,32,64") from None


def uses_in(file: str) -> Callable[[Plan], Mapping[Bucket, int]]:
    """A function that counts how often the requests in `file` use each bucket of a plan.

    The file is opened now and read when the function is called. Raises InputError if it cannot be read.
    """
    from llmc.buckets.evaluation.replay import uses_of

    traffic = traffic_of(file, "order the buckets")
    return lambda plan: uses_of(plan, traffic)
