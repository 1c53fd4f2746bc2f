"""HyperAccel's LPUs: HyperDex's AutoCompiler where it is installed, else portable programs that prove the numbers.

HyperDex compiles a model once for a number of LPUs and a max_length, and its artifact serves every prompt and
continuation of at most so many tokens, one sequence at a time: one native executable, whatever the plan's buckets. Its
own words for the arguments are in runtime/executors/lpu/worker.py.

Without HyperDex every bucket has a portable program (programs.py), verified on this CPU in bfloat16, in which LPUs
compute (Hyper-Accel/vllm, vllm/executor/lpu_executor.py at 026b6ad). These prove the plan and the numbers of the model,
and nothing of HyperDex's compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llmc.compiler.options import CompileOptions, Option
from llmc.compiler.targets.base import ANY_PHASE, Executable, Lowered, Shape, State, Target
from llmc.compiler.targets.costs import Cost
from llmc.compiler.targets.deployment import Deployment
from llmc.compiler.targets.hardware import Hardware, contract_tested
from llmc.compiler.targets.hosting import Hosting
from llmc.compiler.targets.lpu.build import LpuLowered, build
from llmc.compiler.targets.programs import ProgramTarget
from llmc.errors import DeviceError, InputError
from llmc.runtime.executors.lpu import hyperdex
from llmc.runtime.executors.lpu.artifact import Artifact, is_power_of_two

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.compiler.program.program import Program
    from llmc.compiler.stages import Stages
    from llmc.settings import Settings

LOW_MEMORY_USAGE: Option[bool] = Option(
    "low_memory_usage", bool, False, "Drop the checkpoint's own weights once compiled; GPUs cannot prefill then."
)
FAST_COMPILE: Option[bool] = Option("fast_compile", bool, True, "HyperDex's fast compile.")

CARD_BYTES = 16 << 30
"""Memory of a card, an Alveo U55C (Hyper-Accel/docs, docs/useful_commands.md at 60fc952)."""


class LpuTarget(ProgramTarget):
    """See the module's docstring. `devices` LPUs share the model."""

    name: ClassVar[str] = "lpu"
    also_called: ClassVar[tuple[str, ...]] = ("hyperaccel", "hyperdex")
    why_static: ClassVar[str] = "a portable program has fixed shapes, and HyperDex's artifact its max_length"
    hardware: ClassVar[Hardware] = contract_tested("portable programs were run and verified on CPU")
    guide: ClassVar[str] = "docs/lpu.md"
    dtypes: ClassVar[tuple[str, ...]] = ("bf16",)
    options: ClassVar[tuple[Option[Any], ...]] = (LOW_MEMORY_USAGE, FAST_COMPILE)
    config_only: ClassVar[bool] = False
    most_sequences: ClassVar[int | None] = 1

    def __init__(self, devices: int = 1) -> None:
        super().__init__()
        self._devices = devices

    @classmethod
    def of(cls, detail: str, settings: Settings) -> Self:
        """For "lpu:N" N LPUs, else NUM_LPU_DEVICES, else one; a power of two."""
        named = f"--device lpu:{detail}" if detail else f"NUM_LPU_DEVICES={settings.num_lpu_devices}"
        if detail and not (detail.isascii() and detail.isdecimal() and len(detail) < 6):
            raise InputError(f"{named}: behind the colon stands a number of LPUs, as in lpu:2")
        devices = int(detail) if detail else settings.num_lpu_devices or 1
        if not is_power_of_two(devices):
            raise InputError(f"{named}: HyperDex compiles for a power of two of LPUs: 1, 2, 4, 8 …")
        return cls(devices)

    @cached_property
    def _hyperdex(self) -> hyperdex.HyperDexToolchain | None:
        try:
            return hyperdex.find_hyperdex(self.settings)
        except DeviceError:
            return None

    @property
    def _native(self) -> bool:
        return self._hyperdex is not None

    @property
    def state(self) -> State:
        """Native where HyperDex is."""
        return "native" if self._native else "portable"

    def prefills_on(self, device: str) -> Mapping[str, str] | None:
        """NVIDIA GPUs: HyperDex's hybrid mode moves keys and values itself (docs/huggingface_api.md, as above)."""
        name, _, count = device.partition(":")
        if name not in ("cuda", "gpu"):
            return None
        if count and not (count.isascii() and count.isdecimal() and int(count)):
            raise InputError(f"--prefill-device {device}: behind the colon stands a number of GPUs, as in cuda:2")
        return {"NUM_GPU_DEVICES": count or "1", "NUM_LPU_DEVICES": str(self._devices)}

    def default_dtype(self, quantize: str) -> str:
        """What LPUs compute in."""
        return "bf16"

    @property
    def specialises_by_default(self) -> bool:
        """Portable programs have fixed shapes."""
        return not self._native

    def configure(self, options: CompileOptions) -> CompileOptions:
        """An artifact has no shapes, and gives no logits."""
        if not self._native:
            return super().configure(options)
        if options.specialise:
            raise InputError("--specialise is not offered for device lpu: one artifact serves every bucket")
        if options.sample_top_k:
            raise InputError("--sample-top-k is not offered for device lpu: HyperDex gives tokens, no logits")
        return Target.configure(self, options)

    def compiled_with(self, device: str, recorded: Mapping[str, Any]) -> CompileOptions:
        """Whether it was HyperDex that compiled is not this host's to say."""
        return super().compiled_with(device, {name: value for name, value in recorded.items() if name != "specialise"})

    def resolve(self, options: CompileOptions, deployment: Deployment) -> tuple[Target, CompileOptions, str]:
        """Refuses a plan of several sequences."""
        sequences = deployment.limits.max_num_seqs
        if sequences > 1:
            raise InputError(
                f"the plan has {sequences} sequences at once, and LPUs run one at a time (others wait in the queue): "
                "plan with --max-num-seqs 1"
            )
        return super().resolve(options, deployment)

    def static_dims(self, options: CompileOptions) -> tuple[str, ...]:
        """None of an artifact's."""
        return () if self._native else super().static_dims(options)

    def executor_of(self, options: CompileOptions) -> str:
        """Portable programs run on the CPU."""
        return "lpu" if self._native else self.executor

    def choice(self, options: CompileOptions) -> str:
        """A property of the device."""
        if self._native:
            return (
                f"one artifact for every length, {self._devices} LPUs: another max_length would load all weights again"
            )
        return "one portable program per bucket, one sequence each"

    def remaining(self) -> str:
        """HyperDex's part."""
        if self._native:
            return ""
        return (
            f"on a host with HyperDex, compile the checkpoint again with --device lpu:{self._devices}: AutoCompiler "
            f"makes the artifact there. HyperDex is installed by: {hyperdex.INSTALL}"
        )

    def stage_costs(self, options: CompileOptions, buckets: Sequence[Bucket]) -> Mapping[str, Cost]:
        """HyperDex's compiler is one stage, whose time is not known before the first."""
        return {"hyperdex": Cost()} if self._native else super().stage_costs(options, buckets)

    def toolchain(self) -> dict[str, str]:
        """HyperDex, or the tracer."""
        return super().toolchain() if self._hyperdex is None else {hyperdex.PACKAGE: self._hyperdex.version}

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        """HyperDex's; its cards have no device plug-in that is known here."""
        return Hosting(own_image="HyperDex", host_memory=False)

    def memory(self, options: CompileOptions) -> tuple[int, str] | None:
        """Of the cards."""
        return self._devices * CARD_BYTES, f"of {self._devices} LPUs on Alveo U55C cards"

    def devices(self, options: CompileOptions) -> int:
        """The LPUs."""
        return self._devices

    def manifest_options(self, options: CompileOptions) -> dict[str, Any]:
        """The number of LPUs."""
        return {"devices": self._devices}

    def trace(self, stages: Stages, options: CompileOptions) -> Sequence[Program]:
        """HyperDex has its models built in."""
        return () if self._native else super().trace(stages, options)

    def lower(self, stages: Stages, programs: Sequence[Program], options: CompileOptions) -> Lowered:
        """What HyperDex compiles, all of it: a cached stage."""
        if self._hyperdex is None:
            return super().lower(stages, programs, options)
        low, fast = LOW_MEMORY_USAGE.of(options), FAST_COMPILE.of(options)
        wanted = Artifact(
            self._devices, stages.plan.limits.max_model_len, low, fast, self._hyperdex.version, {}
        )  # fmt: skip
        return build(stages, wanted, self._hyperdex)

    def compile(self, lowered: Lowered, shape: Shape, options: CompileOptions) -> Executable:
        """The names of the artifact's files."""
        if isinstance(lowered, LpuLowered):
            return Executable(lowered.artifact.to_bytes(), self.state)
        return super().compile(lowered, shape, options)

    def shapes(self, buckets: Sequence[Bucket], options: CompileOptions) -> list[Shape]:
        """One for an artifact."""
        if self._native:
            return [Shape(ANY_PHASE, None, None, None, len(buckets))]
        return super().shapes(buckets, options)

    def show(self, lowered: Lowered, shapes: Sequence[Shape], options: CompileOptions) -> Iterator[tuple[str, str]]:
        """The artifact's members, or the programs."""
        if isinstance(lowered, LpuLowered):
            yield "artifact", lowered.artifact.to_bytes().decode()
        else:
            yield from super().show(lowered, shapes, options)
