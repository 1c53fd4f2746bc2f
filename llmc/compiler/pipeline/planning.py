"""Build a plan from a checkpoint's configuration and the user's numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.planner.bucket_file import BucketFile, ContextUnit
from llmc.buckets.planner.budget import Budget
from llmc.buckets.planner.choice import FrontierPoint
from llmc.buckets.planner.planner import PlanInputs, frontier_from, plan_from
from llmc.buckets.strategies.base import Dimension, Range
from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.architectures.shared.rope import positions
from llmc.compiler.checkpoint import Checkpoint, read_config
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import open_target
from llmc.errors import CheckpointError, InputError, UnknownNameError
from llmc.settings import LIMIT_VARIABLES, Settings

if TYPE_CHECKING:
    from llmc.buckets.traffic.source import Traffic
    from llmc.compiler.targets.base import Target

RangeLike = Range | Sequence[int] | None
TrafficLike: TypeAlias = "str | os.PathLike[str] | Traffic | None"


@dataclass(frozen=True)
class PlanArguments:
    """A user's arguments for a plan, from the command line or Python; None means the default.

    model                    a checkpoint, a hub name or a config.json; or None, with max_model_len given
    strategy                 a name of `llmc.buckets.strategies.names()`
    max_model_len …          the limits, see `llmc.buckets.limits.Limits`
    max_seq_len_to_capture   tokens up to which lengths get buckets of their own; longer requests run through the few
                             buckets that coverage needs. Default: max_model_len
    prompt_batch …           ranges (min, step, max), followed by a rule's own numbers; contexts in `context_unit`
    context_unit             "tokens" (default) or "blocks" of block_size tokens; with `from_file` the default is the
                             file's unit
    from_file                a file of bucket specs, see buckets/planner/bucket_file.py
    traffic                  a trace file, or a `llmc.buckets.traffic.source.Traffic` with replay settings
    bench                    a bench file with measured step costs, which replace token counts
    max_graphs …             the budget, see `llmc.buckets.planner.budget.Budget`; time in seconds, memory in bytes
    device                   device of the budget's compile time and graph memory; default cpu
    options                  compile options for it (`CompileOptions`); default: its defaults
    settings                 default: the environment
    target                   the target of `device`, where it is already open
    """

    model: str | Checkpoint | None = None
    strategy: str | None = None
    max_model_len: int | None = None
    max_prompt_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    max_seq_len_to_capture: int | None = None
    prompt_batch: RangeLike = None
    prompt_seq: RangeLike = None
    prompt_context: RangeLike = None
    decode_batch: RangeLike = None
    decode_seq: RangeLike = None
    context_unit: str | None = None
    from_file: str | None = None
    traffic: TrafficLike = None
    bench: str | os.PathLike[str] | None = None
    max_graphs: int | None = None
    max_padding: float | None = None
    max_compile_time: float | None = None
    max_graph_memory: int | None = None
    device: str | None = None
    options: CompileOptions | None = None
    settings: Settings | None = None
    target: Target | None = None

    def limits(self) -> tuple[Limits, dict[str, str]]:
        """The limits, and the origin of each. Raises InputError and CheckpointError as `plan_for` does."""
        names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "max_prompt_len")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        origins = dict.fromkeys(given, "flag")
        for name, number in self._settings.limit_numbers.items():
            if name in names and name not in given:
                given[name], origins[name] = number.value, f"environment {number.variable}"
        if self.device is not None and "max_num_seqs" not in given:
            assert self._target is not None
            most = self._target.description.most_sequences
            if most is not None:
                given["max_num_seqs"], origins["max_num_seqs"] = most, f"device {self.device}"
        named = "--max-model-len" if self.max_model_len is not None else LIMIT_VARIABLES["max_model_len"]
        length, origin = _model_length(given.pop("max_model_len", None), self.model, named)
        limits = Limits(length, **given).reading(_reads_tokens(self.model))
        default = dict.fromkeys(limits.to_dict(), "default")
        if not limits.contexts:
            origins["contexts"] = "model config"
        return limits, {**default, "max_model_len": origin, **origins}

    @cached_property
    def _target(self) -> Target | None:
        return self.target or (None if self.device is None else open_target(self.device, self._settings))

    @cached_property
    def _settings(self) -> Settings:
        return self.settings if self.settings is not None else Settings.from_environment()

    def _decided(self, limits: Limits) -> Mapping[str, Range]:
        if self._target is None or self.options is None:
            return {}
        return self._target.description.ranges(self.options, limits)

    def inputs(self, limits: Limits) -> PlanInputs:
        """The planner's inputs."""
        unit = None if self.context_unit is None else _context_unit(self.context_unit)
        scale = limits.block_size if unit == "blocks" else 1
        given: dict[Dimension, Range | None] = {
            "prompt_batch": _range("prompt_batch", self.prompt_batch),
            "prompt_query": _range("prompt_seq", self.prompt_seq),
            "prompt_context": _range("prompt_context", self.prompt_context, scale),
            "decode_batch": _range("decode_batch", self.decode_batch),
            "decode_context": _range("decode_seq", self.decode_seq, scale),
        }
        decided = self._decided(limits)
        return PlanInputs(
            limits,
            self.strategy,
            {name: found or decided.get(name) for name, found in given.items()},
            self._settings,
            None if self.from_file is None else BucketFile(self.from_file, unit),
            _traffic(self.traffic, self.bench),
            self.max_seq_len_to_capture,
        )


def plan_for(model: str | Checkpoint | None, **keywords: Any) -> Plan:
    """Plan for a checkpoint (open, or by name), a config.json, or `max_model_len` alone; keywords: `PlanArguments`.

    Raises InputError for unusable numbers, a length beyond the model's positions, no length at all, or a budget that no
    plan meets, and CheckpointError when the model cannot be read.
    """
    arguments = PlanArguments(model, **keywords)
    limits, origins = arguments.limits()
    inputs = arguments.inputs(limits)
    budget = Budget(arguments.max_graphs, arguments.max_padding, arguments.max_compile_time, arguments.max_graph_memory)
    costs = None
    if budget.needs_graph_costs and model is not None:
        from llmc.compiler.estimates.footprint import Footprint

        device = arguments.device or "cpu"
        costs = Footprint.open(
            model, limits, device, inputs.settings, arguments.bench, options=arguments.options, target=arguments.target
        )
    return plan_from(inputs, budget, costs, origins)


def frontier_for(model: str | Checkpoint | None, **keywords: Any) -> list[FrontierPoint]:
    """Least padding for each of several graph counts; arguments and errors of `plan_for`, without a budget."""
    arguments = PlanArguments(model, **keywords)
    return frontier_from(arguments.inputs(arguments.limits()[0]))


def _context_unit(unit: str) -> ContextUnit:
    if unit == "tokens":
        return "tokens"
    if unit == "blocks":
        return "blocks"
    raise UnknownNameError("context unit", unit, ("tokens", "blocks"))


def _range(name: str, value: RangeLike, scale: int = 1) -> Range | None:
    if value is None:
        return None
    bounds = value if isinstance(value, Range) else Range.of(name, value)
    return bounds.in_tokens(scale) if scale > 1 else bounds


def _traffic(traffic: TrafficLike, bench: str | os.PathLike[str] | None) -> Traffic | None:
    if traffic is None or not isinstance(traffic, str | os.PathLike):
        return traffic
    from llmc.buckets.cost.bench import Bench
    from llmc.buckets.traffic.source import Traffic

    return Traffic(traffic, bench=None if bench is None else Bench.load(bench))


def _model_length(flag: int | None, source: str | Checkpoint | None, named: str) -> tuple[int, str]:
    """max_model_len and its origin, given (as `named`) or from the config, checked against the config's limit."""
    if source is None:
        if flag is None:
            raise InputError("nothing to plan for: give MODEL, --config FILE or --max-model-len N")
        return flag, "flag"
    config = read_config(source)
    found = positions(config)
    if found is None:
        if flag is None:
            raise InputError(f"{_named(source)}: its config has no max_position_embeddings; give --max-model-len N")
        return flag, "flag"
    default, longest = found
    if flag is None:
        return default, "model config"
    if flag > longest:
        raise InputError(f"{named} {flag} is above the {longest} positions of {_named(source)}; lower it")
    return flag, "flag"


def _reads_tokens(source: str | Checkpoint | None) -> bool:
    """Whether a model's graphs read cached tokens, by its configuration; a purely recurrent model reads none."""
    if source is None:
        return True
    try:
        cache = cache_of(read_config(source))
    except CheckpointError:
        return True
    return bool(cache.kv) or not cache.states


def _named(source: str | Checkpoint) -> str:
    return source if isinstance(source, str) else source.requested
