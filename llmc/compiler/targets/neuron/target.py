"""AWS Trainium and Inferentia: `--device neuron[:trn1|inf2|trn2]`, one HLO module a bucket.

Graphs, weights and cache are those of the xla target: weights are inputs, so that all buckets share one file, and the
cache is contiguous, slots × max_model_len. A module is portable: it is verified on this host's CPU, and neuronx-cc
makes a NEFF of it where that is installed (compiler.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llmc.compiler.options import MAX_TOP_K, Option
from llmc.compiler.program.stage import both_weightless
from llmc.compiler.targets.base import Executable, State
from llmc.compiler.targets.costs import Cost, Verifying
from llmc.compiler.targets.hardware import Hardware, contract_tested
from llmc.compiler.targets.neuron.chips import DEFAULT, Chip, chip_of
from llmc.compiler.targets.neuron.neuronx_cc import SECONDS
from llmc.compiler.targets.xla.target import CACHE_SLOTS, TENSOR_PARALLEL, XlaLowered, XlaTarget

if TYPE_CHECKING:
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.program.program import Program
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.base import Deployment, Lowered, Shape, Target
    from llmc.compiler.targets.finishing import Finisher
    from llmc.compiler.targets.xla.build import Job
    from llmc.compiler.targets.xla.step import Core
    from llmc.settings import Settings


COMPILER_SECONDS: Option[int] = Option(
    "neuronx_cc_timeout", int, SECONDS, "Seconds that one run of neuronx-cc may take.", metavar="N", least=1,
    shapes_executable=False,
)  # fmt: skip


class NeuronTarget(XlaTarget):
    """See the module's docstring."""

    name: ClassVar[str] = "neuron"
    executor: ClassVar[str] = "neuron"
    why_static: ClassVar[str] = "neuronx-cc compiles fixed shapes"
    options: ClassVar[tuple[Option[Any], ...]] = (TENSOR_PARALLEL, CACHE_SLOTS, COMPILER_SECONDS)
    loops: ClassVar[bool] = False
    hardware: ClassVar[Hardware] = contract_tested("the modules were run and verified on CPU")
    guide: ClassVar[str] = "docs/neuron.md"
    executable_seconds: ClassVar[float] = 1.5
    executable_bytes: ClassVar[int] = 400_000
    device_seconds: ClassVar[float] = 60.0
    verifying: ClassVar[Verifying] = Verifying(
        begin=Cost(fixed=1.0), opened=Cost(fixed=3.0), step=Cost(parameters=0.02), tokens=Cost(parameters=2.2)
    )

    def __init__(self, chip: str = "") -> None:
        self._named = chip

    @classmethod
    def of(cls, detail: str, settings: Settings) -> Self:
        """For the chip behind the name, else the one that NEURON_PLATFORM_TARGET_OVERRIDE names."""
        return cls(detail or settings.neuron_target or "")

    @property
    def chip(self) -> Chip:
        """The chip that is compiled for; raises UnknownNameError listing the known ones."""
        return chip_of(self._named or DEFAULT)

    def configure(self, options: CompileOptions) -> CompileOptions:
        """Refuses a chip that is not known. The 256 largest logits are found on the device if no number is given."""
        _ = self.chip
        options = super().configure(options)
        return options if options.sample_top_k else replace(options, sample_top_k=MAX_TOP_K)

    def resolve(self, options: CompileOptions, deployment: Deployment) -> tuple[Target, CompileOptions, str]:
        """Itself; a vocabulary below 256 tokens is all that can be found."""
        if not options.sample_top_k:
            options = replace(options, sample_top_k=min(MAX_TOP_K, int(deployment.config["vocab_size"])))
        return self, options, ""

    def choice(self, options: CompileOptions) -> str:
        """A property of the compiler."""
        return f"one executable per bucket: {self.why_static}"

    @property
    def state(self) -> State:
        """Portable without neuronx-cc."""
        return "portable"

    def remaining(self) -> str:
        """What turns a module into what a NeuronCore runs."""
        return (
            "neuronx-cc has to make a NEFF of each module, on an x86-64 host with the Neuron SDK, and with "
            f"NEURON_PLATFORM_TARGET_OVERRIDE={self.chip.name} if that has no NeuronCores"
        )

    def finisher(self) -> Finisher | None:
        """neuronx-cc."""
        from llmc.compiler.targets.neuron.finisher import NeuronFinisher

        return NeuronFinisher(self.chip, self.settings)

    def toolchain(self) -> dict[str, str]:
        """JAX, which makes the modules."""
        return {name: version for name, version in super().toolchain().items() if name != "XLA_FLAGS"}

    def isa(self) -> tuple[str, ...]:
        """None of a host's."""
        return ()

    def described_machine(self) -> dict[str, str]:
        """The chip."""
        return {"chip": self.chip.name}

    def memory(self, options: CompileOptions) -> tuple[int, str] | None:
        """Of the cores that a graph is sharded over."""
        cores, chip = TENSOR_PARALLEL.of(options), self.chip
        return cores * chip.memory[chip.default_lnc], f"of {cores} cores of {chip.name}"

    def trace(self, stages: Stages, options: CompileOptions) -> Sequence[Program]:
        """As for xla, but for the largest logits, which lowering.py finds."""
        super().trace(stages, options)
        return both_weightless(stages, replace(options, sample_top_k=0))

    def analyse(
        self, stages: Stages, lowered: Lowered, files: Sequence[Path], options: CompileOptions
    ) -> dict[str, Any]:
        """How weights are split where they are."""
        assert isinstance(lowered, XlaLowered)
        return {"tensor_parallel": lowered.split} if TENSOR_PARALLEL.of(options) > 1 else {}

    def build(self, job: Job, options: CompileOptions) -> bytes:
        """The module of a function."""
        from llmc.compiler.targets.neuron.lowering import lower

        return lower(job, self.machine(options), self.chip.name)

    def compile(self, lowered: Lowered, shape: Shape, options: CompileOptions) -> Executable:
        """Lower the program at the bucket's sizes."""
        return Executable(self.build(self._job(lowered, shape, options), options), self.state)

    def _sharded(self, core: Core, config: Mapping[str, Any], options: CompileOptions) -> Core:
        from llmc.compiler.targets.neuron.lowering import TopCore

        core = super()._sharded(core, config, options)
        return TopCore(core, options.sample_top_k) if options.sample_top_k else core
