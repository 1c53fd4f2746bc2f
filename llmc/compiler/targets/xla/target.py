"""XLA through JAX: executables of one shape over a cache that stays on the device.

The traced program becomes a JAX function (targets/xla/), is exported as StableHLO and compiled. Weights are arguments,
so that all buckets share one weights file and executables depend only on shapes: with `--config` they are compiled
before there are weights. XlaCpuTarget is for this host, described.py for others (tpu.py, and targets/cuda/).
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.artifacts.log import logger
from llmc.compiler.checkpoint.adapter_layout import ADAPTERS, SELECTABLE
from llmc.compiler.code import code_digest
from llmc.compiler.options import CompileOptions, Option
from llmc.compiler.program.program import (
    CACHED,
    DTYPES,
    PROGRAM,
    Program,
    WeightlessDialect,
    both_weightless,
    program_for,
)
from llmc.compiler.stages import Stages, version_of
from llmc.compiler.targets.base import CompiledExecutable, Lowered, Shape, Target, cache_for
from llmc.compiler.targets.costs import WEIGHTS, Costs, Timing, Verifying, traces
from llmc.compiler.targets.description import TRACING, DeviceDescription, Hardware, Hosting, Requirements
from llmc.compiler.targets.workers import Workers
from llmc.compiler.targets.xla.capacity import CAPACITY_MULTIPLE, array_kind, capacity, gib
from llmc.compiler.targets.xla.formats import KV_CACHE_DTYPE, KV_CACHES, QUANTIZED_DTYPES, cache_dtype, described_as
from llmc.compiler.weights.stage import ITEM_BYTES, Described, described_stage, shared_files
from llmc.errors import InputError
from llmc.runtime.accelerators import CPU
from llmc.runtime.host import host_features

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.workspace import Workspace
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.limits import Limits
    from llmc.compiler.architectures.shared.size import ModelSize, Weights
    from llmc.compiler.targets.xla.build import Machine, XlaJob
    from llmc.compiler.targets.xla.capacity import ArrayKind
    from llmc.compiler.targets.xla.sharding import Dims
    from llmc.compiler.targets.xla.step import Core
    from llmc.compiler.verification.limits import VerificationPolicy
    from llmc.runtime.cache_shape import CacheShape, CacheTensor
    from llmc.runtime.executors.xla.envelope import Tensor

KEPT_PREFIXES = 2
"""Cache slots in addition to running sequences', for finished prompts that others may begin with."""

TENSOR_PARALLEL: Option[int] = Option(
    "tensor_parallel", int, 1, "Devices that each graph is sharded over.", metavar="N", least=1
)
LOWERING: Option[str] = Option(
    "lowering",
    str,
    "jax",
    "What converts the trace to StableHLO.",
    metavar="jax|torch-xla",
    choices=("jax", "torch-xla"),
)
ROLL_LAYERS: Option[bool | None] = Option(
    "roll_layers", bool, None, "Repeated layers as one scanned body. Default: yes for tpu, no for cuda and xla."
)
CACHE_SLOTS: Option[int | None] = Option(
    "cache_slots", int, None,
    "Sequences that the cache on the device holds, those kept for their prefixes included. Default: max-num-seqs + "
    f"{KEPT_PREFIXES} kept prefixes.",
    metavar="N", least=1,
)  # fmt: skip

_STEP_INPUTS = ("token_ids", "past_lengths", "new_lengths", "slots")


@dataclass(frozen=True)
class XlaLowered(Lowered):
    """Adds the steps' common inputs as JSON (`layout`: keys and values, the weights), their sharding for people
    (`split`), whether layers are rolled, the model's configuration, and its cache in the executor's layout.
    """

    layout: Mapping[str, Any]
    split: Mapping[str, Any]
    rolled: bool
    config: Mapping[str, Any]
    cache: CacheShape


XLA = DeviceDescription(
    "",
    "xla",
    quantisations=("none", *QUANTIZED_DTYPES),
    dtypes=tuple(DTYPES),
    options=(TENSOR_PARALLEL, LOWERING, ROLL_LAYERS, CACHE_SLOTS, KV_CACHE_DTYPE),
    why_static="XLA compiles fixed shapes",
    selects_adapters=True,
    config_only=True,
    needs_processes=True,
    reads_files=False,
    requirements=Requirements((*TRACING, "jax"), ("jax",), ("compile", "xla"), ("xla",)),
)
"""The common description of XLA's devices."""


LAYER_BYTES = {False: 900_000, True: 1_300_000}
"""Bytes of machine code and its description per layer, by whether cached tokens are read."""
HELD = 2.5
"""Memory as a multiple of the largest run's temporary buffers: its own, and what earlier runs have not released."""


class XlaCosts(Costs):
    """Common cost estimates of XLA's devices."""

    verifying: ClassVar[Verifying] = Verifying(
        begin=Timing(fixed=1.0),
        opened=Timing(fixed=1.5),
        step=Timing(parameters=0.02),
        tokens=Timing(parameters=2.2),
    )
    executable_bytes: ClassVar[int] = 1_000_000
    splits_weights: ClassVar[tuple[str, ...]] = (TENSOR_PARALLEL.flag,)

    def stage_costs(self, options: CompileOptions, buckets: Sequence[Bucket]) -> Mapping[str, Timing]:
        return {"trace": traces(buckets), "weights": WEIGHTS, "slots": Timing(fixed=1.0)}

    def weight_bits(self, options: CompileOptions, weights: Weights) -> float:
        """8 where they are quantized, which experts are not; row scales add a hundredth or less."""
        if options.quantize in QUANTIZED_DTYPES and not weights.experts:
            return 8.0
        return super().weight_bits(options, weights)

    def cache_bytes(self, options: CompileOptions) -> int:
        return ITEM_BYTES[KV_CACHES[cache_dtype(options)]]

    def devices(self, options: CompileOptions) -> int:
        return TENSOR_PARALLEL.of(options)


class XlaCpuCosts(XlaCosts):
    """Cost estimates on this host's CPU."""

    executable_seconds: ClassVar[float] = 3.0
    verifying: ClassVar[Verifying] = replace(XlaCosts.verifying, opened=Timing(layers=0.2))
    graph_bytes_source: ClassVar[str] = "code of each executable, and the temporary buffers of the largest, as measured"

    def graph_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """Machine code and its description, whatever the batch: 22 times the serialised bytes."""
        return model.layers * LAYER_BYTES[bucket.context > 0]

    def workspace_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """XLA's temporary buffers: new keys and values, the widest layer, its scores, and the gathered cache.

        Quantized weights are copied to float32 for a run.
        """
        copied = 4 * model.parameters if options.quantize in QUANTIZED_DTYPES else 0
        seen = bucket.context + bucket.query
        each = model.cache_values + model.working_set + model.heads * seen
        return copied + int(HELD * 4 * (each * bucket.tokens + bucket.batch * bucket.context * model.cache_values))


class XlaTarget(Target):
    """The common part of XLA's targets."""

    rolls_by_default: ClassVar[bool] = False
    loops: ClassVar[bool] = True
    """Whether compiled programs may have loops."""

    def configure(self, options: CompileOptions) -> CompileOptions:
        if LOWERING.of(options) != "jax" and ROLL_LAYERS.of(options):
            raise InputError("--roll-layers works with --lowering jax; leave one of them out")
        if LOWERING.of(options) != "jax" and options.quantize in QUANTIZED_DTYPES:
            raise InputError(f"--quantize {options.quantize} works with --lowering jax; leave one of them out")
        options = super().configure(options)
        cache = cache_dtype(options)
        if (options.dtype, cache) == ("bf16", "f32"):
            raise InputError(
                f"{KV_CACHE_DTYPE.flag} f32: keys and values of --dtype bf16 have no more than bf16 holds; leave it out"
            )
        return options.changed(kv_cache_dtype=None if cache == options.dtype else cache)

    @property
    def verification(self) -> VerificationPolicy:
        from llmc.compiler.verification.limits import VerificationPolicy

        return VerificationPolicy(cache_dtype=cache_dtype)

    def toolchain(self) -> dict[str, str]:
        found = {package: version_of(package, "xla") for package in ("jax", "jaxlib")}
        flags = self.settings.xla_flags
        return {**found, **({"XLA_FLAGS": flags} if flags else {})}

    def _rolls(self, programs: Sequence[Program], cache: CacheShape, options: CompileOptions) -> bool:
        """Whether repeated layers become one scanned body. Raises InputError where that is requested and impossible."""
        if ROLL_LAYERS.of(options) is False or LOWERING.of(options) != "jax":
            return False
        if not (ROLL_LAYERS.of(options) or self.rolls_by_default):
            return False
        from llmc.compiler.targets.xla.scan_layers import NotRollableError, roll

        try:
            if len(cache.groups) != 2 or len(cache) != 2 * cache.layers:
                rings = f", windows in ring buffers ({ROLL_LAYERS.flag} holds all tokens)" if cache.rewind.rings else ""
                raise NotRollableError(f"it has caches of several kinds{rings}")
            for program in programs:
                roll(_parsed(program.paths[PROGRAM]).at(2, 4, 8 * (program.name == CACHED)))
        except NotRollableError as e:
            if ROLL_LAYERS.of(options):
                raise InputError(
                    f"the layers cannot be rolled into one body: {e}; compile with --no-roll-layers"
                ) from e
            logger().info("layers are not rolled into one body: %s", e)
            return False
        return True

    @abstractmethod
    def machine(self, options: CompileOptions) -> Machine:
        """Return the devices that graphs are sharded over. Raises DeviceError."""

    def trace(self, stages: Stages, options: CompileOptions) -> Sequence[Program]:
        from llmc.compiler.targets.xla.sharding import require_degree

        self.cache_shape(stages.checkpoint.config, options)
        devices, where = self._devices(options)
        require_degree(TENSOR_PARALLEL.of(options), devices, stages.checkpoint.config, where)
        self._other_lowering(options)  # missing packages are reported before anything is built
        return both_weightless(stages, self._traced(options), self.dialect(options))

    def cache_shape(self, config: Mapping[str, Any], options: CompileOptions) -> CacheShape:
        """Return the shape of the model's cache, before anything is traced. Raises CheckpointError, and InputError for
        adapters that another lowering has no input for.
        """
        from llmc.compiler.architectures.shared.caches import cache_of, uniform_cache_of

        if LOWERING.of(options) != "jax":
            if SELECTABLE in config:
                raise InputError(
                    "adapters that requests choose work with --lowering jax; leave one of the two out, or merge the "
                    "adapter (--lora)"
                )
            uniform_cache_of(config, f"{self.description.name} with {LOWERING.flag} {LOWERING.of(options)}")
        return cache_of(config)

    def held_cache(self, cache: CacheShape, limits: Limits, options: CompileOptions) -> CacheShape:
        """Ring buffers of whole lanes with room for a block of the plan, where they can be lowered and layers stay
        alike.
        """
        held = cache.in_rings(limits.block_size, limits.max_model_len, CAPACITY_MULTIPLE)
        alike = len(held.groups) == len(cache.groups)
        return held if LOWERING.of(options) == "jax" and (alike or not ROLL_LAYERS.of(options)) else cache

    def dialect(self, options: CompileOptions) -> WeightlessDialect:
        return "two_part"

    def _traced(self, options: CompileOptions) -> CompileOptions:
        return options

    def lower(self, stages: Stages, programs: Sequence[Program], options: CompileOptions) -> Lowered:
        """Steps are lowered one by one."""
        lowering = self._other_lowering(options)
        cache = cache_for(self, stages, options)
        rolled = self._rolls(programs, cache, options)
        stack = described_as(rolled, str(options.quantize))
        shared = shared_files(stages, programs[0], stack)
        described = json.loads(stages.store.get_bytes(described_stage(stages, programs[0], stack).digest))
        layout, split = self._layout(stages, options, cache, described)
        self.require_fits(stages, options, layout)
        slots = self._slot_stage(stages, options, layout)
        return XlaLowered(
            files={**shared.files, **{name: blob.digest for name, blob in slots.outputs.items()}},
            components={
                "layout": digest_bytes(canonical_json(layout)),
                **{program.name: program.outputs[PROGRAM].digest for program in programs},
                **self.described_machine(),
                **lowering,
            },
            inputs={program.name: program.paths[PROGRAM] for program in programs},
            layout=layout,
            rolled=rolled,
            split=split,
            config=dict(stages.checkpoint.config),
            cache=cache,
        )

    def _devices(self, options: CompileOptions) -> tuple[int, str]:
        """How many devices graphs may be sharded over, and their owner; the CPU is divided into any number."""
        return TENSOR_PARALLEL.of(options), "this host"

    def described_machine(self) -> dict[str, str]:
        """Return key components of the machine, in addition to the instruction set."""
        return {}

    def _other_lowering(self, options: CompileOptions) -> dict[str, str]:
        if LOWERING.of(options) == "jax":
            return {}
        from llmc.compiler.targets.xla.torch_xla import find_python, versions

        return versions(find_python(self.settings.torch_xla_python))

    def require_fits(self, stages: Stages, options: CompileOptions, layout: Mapping[str, Any]) -> None:
        """Raise CompileError where weights and cache alone do not fit a device; a host's memory is unknown."""

    def analyse(
        self, stages: Stages, lowered: Lowered, files: Sequence[Path], options: CompileOptions
    ) -> dict[str, Any]:
        del stages
        found = self.analysed(files)
        if TENSOR_PARALLEL.of(options) > 1:
            assert isinstance(lowered, XlaLowered)
            found["tensor_parallel"] = lowered.split
        return found

    def analysed(self, files: Sequence[Path]) -> dict[str, Any]:
        from llmc.compiler.targets.xla.build import ANALYSIS
        from llmc.runtime.executors.envelope import ExecutableFile
        from llmc.runtime.executors.xla.envelope import FORM

        headers = [ExecutableFile.parse(file.read_bytes(), str(file), FORM).header for file in files]
        return {"executables": [{name: header[name] for name in ANALYSIS} for header in headers]}

    def describe(self, analysis: Mapping[str, Any]) -> list[str]:
        return analysis_lines(analysis)

    def _layout(
        self, stages: Stages, options: CompileOptions, cache: CacheShape, described: Sequence[Described]
    ) -> tuple[Any, Any]:
        """Common inputs of all steps as JSON (keys and values, the weights), and their sharding for people."""
        from llmc.compiler.targets.xla.sharding import describe, weight_shardings

        limits, config, degree = stages.plan.limits, stages.checkpoint.config, TENSOR_PARALLEL.of(options)
        rows = max(limits.max_num_seqs, *(b.batch for b in stages.plan.buckets))
        slots = max(CACHE_SLOTS.of(options) or rows + KEPT_PREFIXES, rows)
        longest = max(limits.max_model_len, *(b.context for b in stages.plan.buckets))
        split = weight_shardings({d["name"]: tuple(d["shape"]) for d in described}, config, degree)
        layout = {
            "cache": [self._cache_array(group, slots, capacity(longest), options) for group in cache.groups],
            "weights": [
                {"name": d["name"], "shape": d["shape"], "dtype": d["dtype"], "dims": list(split[d["name"]].dims)}
                for d in described
            ],
        }  # fmt: skip
        item_bytes = {d["name"]: ITEM_BYTES[d["dtype"]] for d in described}
        return layout, describe(split, config, degree, cache, item_bytes)

    def _cache_array(
        self, group: Sequence[CacheTensor], slots: int, tokens: int, options: CompileOptions
    ) -> dict[str, Any]:
        from llmc.compiler.targets.xla.sharding import cache_dims

        first = group[0]
        dtype = KV_CACHES[cache_dtype(options)] if first.kind == "kv" else DTYPES[options.dtype]
        return {
            "name": {"key": "keys", "value": "values"}.get(first.name, first.name), "kind": array_kind(first),
            "shape": [len(group), *first.size(slots, tokens)],
            "dtype": dtype if first.dtype is None else DTYPES[first.dtype],
            "dims": list(cache_dims(first, TENSOR_PARALLEL.of(options))),
        }  # fmt: skip

    def _slot_stage(self, stages: Stages, options: CompileOptions, layout: Mapping[str, Any]) -> Entry:
        components = {
            "cache": digest_bytes(canonical_json(layout["cache"])),
            "target": self.description.name,
            "state": self.state,
            "devices": TENSOR_PARALLEL.of(options),
            **self.described_machine(),
            **{f"toolchain.{k}": v for k, v in self.toolchain().items()},
            "isa": " ".join(self.isa()),
            "code": code_digest(self._slot_stage),
        }

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            if self.description.fresh_process:
                with Workers(1, self.description.fresh_process) as pool:
                    built = pool.submit(_slot_programs, options, layout["cache"]).result()
            else:
                built = _slot_programs(options, layout["cache"])
            return {name: workspace.put_bytes(data) for name, data in built.items()}

        return stages.run("slots", components, build)

    def compile(self, lowered: Lowered, shape: Shape, options: CompileOptions) -> CompiledExecutable:
        return CompiledExecutable(self.build(self._job(lowered, shape, options), options), self.state)

    def build(self, job: XlaJob, options: CompileOptions) -> bytes:
        from llmc.compiler.targets.xla.build import build

        return build(job, self.machine(options))

    def show(self, lowered: Lowered, shapes: Sequence[Shape], options: CompileOptions) -> Iterator[tuple[str, str]]:
        from llmc.compiler.targets.xla.build import stablehlo

        machine = self.machine(options)
        for shape in shapes:
            yield str(shape), stablehlo(self._job(lowered, shape, options), machine)

    def _job(self, lowered: Lowered, shape: Shape, options: CompileOptions) -> XlaJob:
        from llmc.compiler.targets.xla.build import XlaJob
        from llmc.compiler.targets.xla.step import QuantisedCore, step_function
        from llmc.runtime.executors.xla.envelope import Tensor

        assert isinstance(lowered, XlaLowered)
        batch, query, context = shape.sizes
        layout = lowered.layout
        core = self._core(lowered, shape, options)
        weights = {tensor.name: tensor for tensor in tensors(layout["weights"])}
        entries = [tensor.dims for tensor in tensors(layout["cache"])]
        core = self._sharded(QuantisedCore(core, weights), lowered.config, options, entries)
        rows = [Tensor(name, (batch,), "int32", (None,)) for name in _STEP_INPUTS]
        rows[0] = Tensor("token_ids", (batch, query), "int32", (None, None))
        adapted = SELECTABLE in lowered.config
        rows += [Tensor(ADAPTERS, (batch,), "int32", (None,))] * adapted
        inputs = (*rows, *tensors(layout["cache"]), *(weights[name] for name in core.weights))
        views = self.dialect(options) == "read_only"
        kinds = kinds_of(layout["cache"])
        step = step_function(core, shape.phase, context, self.loops, views, DTYPES[options.dtype], kinds, adapted)
        donated = tuple(range(len(rows), len(rows) + len(kinds)))
        return XlaJob("step", step, inputs, donated, str(shape), self._native(step, options))

    def _native(self, step: Callable[..., Any], options: CompileOptions) -> Callable[..., Any] | None:
        """The step compiled for the machine, where it differs from the portable program."""
        return None

    def _core(self, lowered: XlaLowered, shape: Shape, options: CompileOptions) -> Core:
        program, cache = lowered.inputs[program_for(shape.sizes[2], lowered.inputs)], lowered.cache
        if LOWERING.of(options) == "torch-xla":
            from llmc.compiler.targets.xla.torch_xla import find_python, torch_xla_core

            return torch_xla_core(program.read_bytes(), *shape.sizes, find_python(self.settings.torch_xla_python))
        from llmc.compiler.targets.xla.scan_layers import roll
        from llmc.compiler.targets.xla.step import FlatCore

        bound = _parsed(program).at(*shape.sizes, cache)
        return roll(bound) if lowered.rolled else FlatCore(bound, cache.offsets)

    def _sharded(self, core: Core, config: Mapping[str, Any], options: CompileOptions, entries: Sequence[Dims]) -> Core:
        from llmc.compiler.targets.xla.sharding import ShardedCore

        degree = TENSOR_PARALLEL.of(options)
        return core if degree == 1 else ShardedCore(core, config, degree, entries)


def _slot_programs(options: CompileOptions, cache: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    from llmc.compiler.targets import open_target
    from llmc.compiler.targets.xla.build import XlaJob
    from llmc.compiler.targets.xla.step import slot_programs

    target = open_target(options.device)
    assert isinstance(target, XlaTarget)
    target.machine(options)  # JAX must be configured before its first import
    donated = tuple(range(len(cache)))
    return {
        name: target.build(XlaJob("slots", function, inputs, donated if changes else (), name), options)
        for name, (function, inputs, changes) in slot_programs(tensors(cache), kinds_of(cache)).items()
    }


def kinds_of(described: Sequence[Mapping[str, Any]]) -> list[ArrayKind]:
    """Return the kinds of a layout's cache arrays."""
    return [d["kind"] for d in described]


def tensors(described: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Convert a layout's description to an envelope header's tensors."""
    from llmc.runtime.executors.xla.envelope import Tensor

    return [Tensor(d["name"], tuple(d["shape"]), d["dtype"], tuple(d["dims"])) for d in described]


@cache
def _parsed(program: Path) -> Any:
    from llmc.compiler.program.sized import TracedProgram

    return TracedProgram.parse(program.read_bytes())


def analysis_lines(analysis: Mapping[str, Any]) -> list[str]:
    """Return lines about memory, work, weight sharding and collectives; none for an empty analysis."""
    found = []
    memory = analysis.get("device_memory")
    if memory:
        parts = [f"{name} {gib(memory[key])}" for name, key in _PARTS]
        share = memory["total"] / memory["available"]
        found.append(
            f"one device of {analysis['topology']}: {', '.join(parts)}: {gib(memory['total'])} of "
            f"{gib(memory['available'])} ({share:.0%})"
        )
    executables = analysis.get("executables", [])
    if executables:
        flops = [e["cost"]["flops"] for e in executables]
        temporary = max(e["memory"]["temporary"] for e in executables)
        found.append(
            f"{len(executables)} executables: matmuls of {min(flops) / 1e9:.3g} to {max(flops) / 1e9:.3g} GFLOP "
            f"a step and device, temporary memory up to {gib(temporary)}"
        )
    split = analysis.get("tensor_parallel")
    if split:
        found.append(
            f"tensor parallel over {split['degree']} devices: weights {gib(split['bytes_per_device'])} a device of "
            f"{gib(split['bytes'])}, cache {split['cache']}; collectives of {len(executables)} steps: "
            f"{_exchanged(executables)}"
        )
        found += split["notes"]
    return found


_PARTS = (("weights", "weights"), ("cache", "cache"), ("largest step", "temporary"), ("code", "code"))


def _exchanged(executables: list[Mapping[str, Any]]) -> str:
    counts: Counter[str] = Counter()
    looped: Counter[str] = Counter()
    for executable in executables:
        for kind, amount in executable["collectives"].items():
            counts[kind] += amount["count"]
            looped[kind] += amount["in_loop"]
    return ", ".join(f"{n} {kind} ({looped[kind]} once a layer)" for kind, n in sorted(counts.items())) or "none"


class XlaCpuTarget(XlaTarget):
    """`--device xla`."""

    description = replace(
        XLA,
        name="xla",
        hardware=Hardware("x86-64 with AVX-512 (AMD EPYC)", "jax 0.10.2", "2026-11", "benchmarks/RESULTS.md"),
        guide="docs/xla.md",
        accelerators=(CPU,),
    )

    @property
    def costs(self) -> Costs:
        return XlaCpuCosts()

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        return Hosting(extra="xla")

    def isa(self) -> tuple[str, ...]:
        return host_features()

    def machine(self, options: CompileOptions) -> Machine:
        from llmc.compiler.targets.xla.build import host_machine

        return host_machine(TENSOR_PARALLEL.of(options), self.settings.threads)
