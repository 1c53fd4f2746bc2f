"""AWS Trainium and Inferentia: `--device neuron[:trn1|inf2|trn2]`, one HLO module a bucket.

Graphs, weights and cache are those of the xla target. A module is portable: it is verified on this host's CPU, and
neuronx-cc, where installed, compiles it to a NEFF (on_target.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llmc.artifacts.log import logger
from llmc.buckets.strategies.base import Range
from llmc.compiler.options import MAX_TOP_K, Option
from llmc.compiler.targets.base import CompiledExecutable
from llmc.compiler.targets.costs import Timing, Verifying
from llmc.compiler.targets.description import Hosting, contract_tested
from llmc.compiler.targets.neuron.neuronx_cc import (
    DEFAULT,
    NEURON_CONFIG,
    SECONDS,
    NeuronChip,
    NeuronConfig,
    canonical,
    chip_of,
)
from llmc.compiler.targets.xla.capacity import gib
from llmc.compiler.targets.xla.target import CACHE_SLOTS, TENSOR_PARALLEL, XLA, XlaCosts, XlaLowered, XlaTarget, tensors
from llmc.errors import CompileError, InputError
from llmc.runtime.accelerators import NEURON

if TYPE_CHECKING:
    from llmc.buckets.limits import Limits
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.program.program import Program
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.base import Deployment, Lowered, Resolved, Shape
    from llmc.compiler.targets.costs import Costs
    from llmc.compiler.targets.on_target import OnTargetCompiler
    from llmc.compiler.targets.xla.build import Machine, XlaJob
    from llmc.compiler.targets.xla.sharding import Dims
    from llmc.compiler.targets.xla.step import Core
    from llmc.settings import Settings


COMPILER_SECONDS: Option[int] = Option(
    "neuronx_cc_timeout", int, SECONDS, "Seconds that one run of neuronx-cc may take.", metavar="N", least=1,
    shapes_executable=False,
)  # fmt: skip


def _ranges(options: CompileOptions, limits: Limits) -> Mapping[str, Range]:
    """Without bucketing, one bucket a phase: one whole prompt at a time, and all sequences to the last token."""
    if NeuronConfig.parse(NEURON_CONFIG.of(options)).bucketing:
        return {}
    sizes = {
        "prompt_batch": 1, "prompt_query": limits.longest_prompt, "decode_batch": limits.max_num_seqs,
        "decode_context": limits.max_model_len,
    }  # fmt: skip
    return {name: Range.of(name, [size, size, size]) for name, size in sizes.items()}


class NeuronCosts(XlaCosts):
    """Costs on cores of `chip`, each with `room` bytes under the options."""

    executable_seconds: ClassVar[float] = 1.5
    executable_bytes: ClassVar[int] = 400_000
    device_seconds: ClassVar[float] = 60.0
    verifying: ClassVar[Verifying] = replace(XlaCosts.verifying, opened=Timing(fixed=3.0))

    def __init__(self, chip: str, room: Callable[[CompileOptions], int]) -> None:
        self._chip, self._room = chip, room

    def memory(self, options: CompileOptions) -> tuple[int, str] | None:
        cores = TENSOR_PARALLEL.of(options)
        return cores * self._room(options), f"of {cores} cores of {self._chip}"


class NeuronTarget(XlaTarget):
    """`--device neuron[:CHIP]`."""

    description = replace(
        XLA,
        name="neuron",
        executor="neuron",
        also_called=("trainium", "inferentia", "aws"),
        quantisations=("none",),
        options=(TENSOR_PARALLEL, CACHE_SLOTS, COMPILER_SECONDS, NEURON_CONFIG),
        why_static="neuronx-cc compiles fixed shapes",
        selects_adapters=False,
        ranges=_ranges,
        hardware=contract_tested("the modules were run and verified on CPU"),
        guide="docs/accelerators.md",
        accelerators=(NEURON,),
    )
    loops: ClassVar[bool] = False

    def __init__(self, chip: str = "") -> None:
        self._named = chip

    @classmethod
    def of(cls, detail: str, settings: Settings) -> Self:
        return cls(detail or settings.neuron_target or "")

    @property
    def costs(self) -> Costs:
        return NeuronCosts(self.chip.name, self._room)

    @property
    def chip(self) -> NeuronChip:
        """The chip to compile for. Raises UnknownNameError."""
        return chip_of(self._named or DEFAULT)

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        """The chips that have the cores of one graph, by AWS's device plug-in."""
        cores = int(recorded.get(TENSOR_PARALLEL.name, 1)) * self.chip.default_lnc
        chips = math.ceil(cores / self.chip.cores)
        return Hosting(
            own_image="AWS's Neuron runtime",
            resources={"aws.amazon.com/neuron": chips},
            devices=tuple(f"/dev/neuron{i}" for i in range(chips)),
            host_memory=False,
        )

    def configure(self, options: CompileOptions) -> CompileOptions:
        """The device finds the 256 largest logits unless another number is given."""
        requested, chip = NeuronConfig.parse(NEURON_CONFIG.of(options)), self.chip
        chip.lnc(requested.lnc)
        if text := NEURON_CONFIG.of(options):
            options = options.changed(override_neuron_config=canonical(text))
        if requested.tensor_parallel is not None:
            if TENSOR_PARALLEL.of(options) not in (1, requested.tensor_parallel):
                raise InputError(
                    f"{NEURON_CONFIG.flag}: tp_degree {requested.tensor_parallel} is not --tensor-parallel "
                    f"{TENSOR_PARALLEL.of(options)}; leave one of them out"
                )
            options = options.changed(tensor_parallel=requested.tensor_parallel)
        if requested.dtype is not None:
            if options.dtype not in ("auto", requested.dtype):
                raise InputError(
                    f"{NEURON_CONFIG.flag}: torch_dtype is not --dtype {options.dtype}; leave one of them out"
                )
            options = replace(options, dtype=requested.dtype)
        if not options.sample_top_k:
            options = replace(options, sample_top_k=MAX_TOP_K if requested.top_k is None else requested.top_k)
        return super().configure(options)

    def resolve(self, options: CompileOptions, deployment: Deployment) -> Resolved:
        """The default number of largest logits is limited by the vocabulary."""
        top_k = self.configure(options).sample_top_k
        if not options.sample_top_k:
            options = replace(options, sample_top_k=min(top_k, int(deployment.config["vocab_size"])))
        return super().resolve(options, deployment)

    def remaining(self) -> str:
        return (
            "neuronx-cc has to compile each module to a NEFF, on an x86-64 host with the Neuron SDK, and with "
            f"NEURON_PLATFORM_TARGET_OVERRIDE={self.chip.name} if that has no NeuronCores"
        )

    def on_target(self) -> OnTargetCompiler | None:
        from llmc.compiler.targets.neuron.on_target import NeffCompiler

        return NeffCompiler(self.chip, self.settings)

    def toolchain(self) -> dict[str, str]:
        return {name: version for name, version in super().toolchain().items() if name != "XLA_FLAGS"}

    def machine(self, options: CompileOptions) -> Machine:
        from llmc.compiler.targets.xla.build import host_machine

        return host_machine(TENSOR_PARALLEL.of(options), self.settings.threads)

    def described_machine(self) -> dict[str, str]:
        return {"chip": self.chip.name}

    def trace(self, stages: Stages, options: CompileOptions) -> Sequence[Program]:
        for name, value in self.settings.neuron_quantisation.items():
            logger().warning("%s=%s has no effect: device neuron compiles weights as they are", name, value)
        return super().trace(stages, options)

    def _traced(self, options: CompileOptions) -> CompileOptions:
        """Without `sample_top_k`: lowering.py finds the largest logits."""
        return replace(options, sample_top_k=0)

    def require_fits(self, stages: Stages, options: CompileOptions, layout: Mapping[str, Any]) -> None:
        weights, cache = _shares(layout, TENSOR_PARALLEL.of(options))
        room = self._room(options)
        if weights + cache > room:
            raise CompileError(
                f"weights take {gib(weights)} of a core of {self.chip.name} and the cache {gib(cache)}; a core has "
                f"{gib(room)}: compile for fewer or shorter sequences, or with more --tensor-parallel"
            )

    def analyse(
        self, stages: Stages, lowered: Lowered, files: Sequence[Path], options: CompileOptions
    ) -> dict[str, Any]:
        assert isinstance(lowered, XlaLowered)
        weights, cache = _shares(lowered.layout, TENSOR_PARALLEL.of(options))
        found = {"core_memory": {"weights": weights, "cache": cache, "available": self._room(options)}}
        return {**found, "tensor_parallel": lowered.split} if TENSOR_PARALLEL.of(options) > 1 else found

    def describe(self, analysis: Mapping[str, Any]) -> list[str]:
        memory = analysis["core_memory"]
        found = [
            f"a core of {self.chip.name}: weights {gib(memory['weights'])}, cache {gib(memory['cache'])}, of "
            f"{gib(memory['available'])}; neuronx-cc decides the memory of graphs"
        ]
        if split := analysis.get("tensor_parallel"):
            found += [f"tensor parallel over {split['degree']} cores: cache {split['cache']}", *split["notes"]]
        return found

    def _room(self, options: CompileOptions) -> int:
        requested = NeuronConfig.parse(NEURON_CONFIG.of(options)).lnc
        return self.chip.memory[self.chip.lnc(self.settings.neuron_cores if requested is None else requested)]

    def build(self, job: XlaJob, options: CompileOptions) -> bytes:
        from llmc.compiler.targets.neuron.lowering import lower

        return lower(job, self.machine(options), self.chip.name)

    def compile(self, lowered: Lowered, shape: Shape, options: CompileOptions) -> CompiledExecutable:
        return CompiledExecutable(self.build(self._job(lowered, shape, options), options), self.state)

    def _sharded(self, core: Core, config: Mapping[str, Any], options: CompileOptions, entries: Sequence[Dims]) -> Core:
        from llmc.compiler.targets.neuron.lowering import TopCore

        core = super()._sharded(core, config, options, entries)
        return TopCore(core, options.sample_top_k) if options.sample_top_k else core


def _shares(layout: Mapping[str, Any], cores: int) -> tuple[int, int]:
    """Bytes of weights and of cache on a core."""
    from llmc.runtime.executors.neuron.files import share_bytes

    weights, cache = (sum(share_bytes(t, cores) for t in tensors(layout[name])) for name in ("weights", "cache"))
    return weights, cache
