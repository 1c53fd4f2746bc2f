"""The target contract: how llmc drives one device's compiler.

The pipeline calls `resolve`, then `trace` and `lower` once (programs and weights, which all buckets share), then
`compile` once per distinct shape. `description` holds the device's static facts. Costs, verification, on-target
compilation (`on_target`), kernel tuning and hosting are separate objects. A new target is one file here and one line in
the registry; fake.py is the tutorial.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from llmc.compiler.options import CompileOptions, OptionValue
from llmc.compiler.targets import check_own, refuse_foreign
from llmc.compiler.targets.costs import Costs
from llmc.compiler.targets.description import DeviceDescription, Hosting
from llmc.errors import InputError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.limits import Limits
    from llmc.compiler.architectures.shared.size import Weights
    from llmc.compiler.program.program import Program
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.on_target import OnTargetCompiler
    from llmc.compiler.targets.tuning import Tuner
    from llmc.compiler.verification.limits import VerificationPolicy
    from llmc.runtime.cache_shape import CacheShape

State = Literal["native", "portable"]
ANY_PHASE = "any"
DIMENSIONS = ("batch", "query", "context")


@dataclass(frozen=True)
class Shape:
    """The shape of one executable, which serves `buckets` buckets. A size of None is dynamic."""

    phase: str
    batch: int | None
    query: int | None
    context: int | None
    buckets: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Batch, query and context of a fully static shape."""
        assert self.batch is not None
        assert self.query is not None
        assert self.context is not None
        return self.batch, self.query, self.context

    def __str__(self) -> str:
        sizes = {"batch": self.batch, "query": self.query, "context": self.context}
        fixed = [f"{k}={v}" for k, v in sizes.items() if v is not None]
        return f"{self.phase} {' '.join(fixed) or 'every shape'}"


@dataclass(frozen=True)
class Deployment:
    """Inputs of target resolution: the plan's limits, mean traffic lengths, the model's configuration and weights."""

    limits: Limits
    facts: Mapping[str, Any]
    config: Mapping[str, Any]
    weights: Sequence[Weights]

    @property
    def parameters(self) -> int:
        return sum(one.count for one in self.weights)


@dataclass(frozen=True)
class Resolved:
    """The target for one deployment, and its options: `requested` with defaults filled in.

    `why` is the reason for the target, `decided` the one for defaults that depend on the model; both may be "". The
    `starter`'s executables serve until the others are open.
    """

    target: Target
    requested: CompileOptions
    options: CompileOptions
    why: str = ""
    decided: str = ""
    starter: tuple[Target, CompileOptions] | None = None


class Fixed(NamedTuple):
    """The dimensions (of DIMENSIONS) that executables fix, and the reason. The runtime pads only these."""

    dims: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Recorded:
    """What a manifest records for the opening host: executor, required instruction set, executor options."""

    executor: str
    features: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lowered:
    """Programs in the form that a device's compiler takes, shared by all executables of a compile.

        files         bundle files by name, as digests in the store
        inputs        files that only compiling needs
        forms         the forms of the lowered programs that can be shown
        components    digests that an executable's key must name
        facts         for the target itself
        stand_ins     files that verification runs where this host cannot run the bundle's own; not in the bundle
        folder        created by the pipeline; has `files` under the names of the bundle's blob folder

    A target whose `compile` reads more defines a subclass. Instances can be sent to a worker process.
    """

    files: Mapping[str, str]
    components: Mapping[str, str]
    inputs: Mapping[str, Path]
    forms: Mapping[str, Path] = field(default_factory=dict, kw_only=True)
    facts: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    stand_ins: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    folder: Path = field(default=Path(), kw_only=True)


@dataclass(frozen=True)
class CompiledExecutable:
    """The bytes of an executable, and whether it is final for its device."""

    data: bytes
    state: State


class Target(ABC):
    """The compiler of one device."""

    description: DeviceDescription

    @classmethod
    def of(cls, detail: str, settings: Settings) -> Target:
        """Create the target for `--device name:detail`; `detail` is "" for the name alone. Raises InputError."""
        if detail:
            name = cls.description.name
            raise InputError(f"--device {name}:{detail}: device {name} takes no detail after the colon")
        return cls()

    @cached_property
    def settings(self) -> Settings:
        return Settings.from_environment()

    def resolve(self, options: CompileOptions, deployment: Deployment) -> Resolved:
        """Select the target that compiles (usually this one), and its options. Raises InputError."""
        return Resolved(self, options, self.configure(options))

    def configure(self, options: CompileOptions) -> CompileOptions:
        """Fill in defaults. Raises InputError for options that this target does not offer."""
        device = self.description
        quantize = options.quantize or device.default_quantize
        dtype = device.dtypes[0] if options.dtype == "auto" else options.dtype
        for what, value, known in (("quantize", quantize, device.quantisations), ("dtype", dtype, device.dtypes)):
            if value not in known:
                raise InputError(
                    f"--{what} {value} is not offered for device {device.name}; offered: {', '.join(known)}"
                )
        if device.why_static and options.specialise is False:
            raise InputError(
                f"--no-specialise is not offered for device {device.name}: {device.why_static}; leave the flag out"
            )
        specialise = bool(device.why_static) if options.specialise is None else options.specialise
        return replace(options, quantize=quantize, dtype=dtype, specialise=specialise, own=_own(device, options))

    def recorded(self, options: CompileOptions) -> Recorded:
        return Recorded(self.description.executor, self.isa())

    def fixes(self, options: CompileOptions) -> Fixed:
        if not options.specialise:
            return Fixed((), "one executable for all buckets, run at the exact shape")
        why = self.description.why_static
        return Fixed(DIMENSIONS, f"one executable per bucket: {why}" if why else "one executable per bucket")

    def shapes(self, buckets: Sequence[Bucket], options: CompileOptions) -> list[Shape]:
        """Return the distinct shapes of `buckets`, largest first within each phase, which is the order of warm-up."""
        if not self.fixes(options).dims:
            return [Shape(ANY_PHASE, None, None, None, len(buckets))]
        counted = Counter((b.phase, b.batch, b.query, b.context) for b in buckets)
        order = sorted(counted, key=lambda k: (k[0] != "prompt", *(-size for size in k[1:])))
        return [Shape(*key, counted[key]) for key in order]

    @abstractmethod
    def toolchain(self) -> dict[str, str]:
        """Return versions of the packages that determine an executable, without importing them. Raises DeviceError."""

    def isa(self) -> tuple[str, ...]:
        """Return the instruction set that executables are tied to, or ()."""
        return ()

    def held_cache(self, cache: CacheShape, limits: Limits, options: CompileOptions) -> CacheShape:
        """Return the cache layout of the executor, with ring buffers where it supports them (`CacheShape.in_rings`)."""
        return cache

    def trace(self, stages: Stages, options: CompileOptions) -> Sequence[Program]:
        """Trace the programs to lower, each as a cached stage; none for a device with built-in models.

        Raises CompileError, and CheckpointError for a model that the device cannot hold.
        """
        return ()

    @abstractmethod
    def lower(self, stages: Stages, programs: Sequence[Program], options: CompileOptions) -> Lowered:
        """Lower programs and weights, each as a cached stage. Raises UnfitError and CompileError."""

    @abstractmethod
    def compile(self, lowered: Lowered, shape: Shape, options: CompileOptions) -> CompiledExecutable:
        """Compile one executable, in any thread or in a worker process. Raises CompileError."""

    def show(self, lowered: Lowered, shapes: Sequence[Shape], options: CompileOptions) -> Iterator[tuple[str, str]]:
        """Yield name and text of each lowered program, for each of `shapes` where a device lowers per shape."""
        del shapes, options
        for name, path in lowered.forms.items():
            yield name, path.read_text()

    def analyse(
        self, stages: Stages, lowered: Lowered, files: Sequence[Path], options: CompileOptions
    ) -> dict[str, Any]:
        """Return facts about compiled `files` for the manifest and --json. Raises CompileError if unfit."""
        return {}

    def describe(self, analysis: Mapping[str, Any]) -> list[str]:
        """Format the result of `analyse` as lines for people."""
        return []

    @property
    def state(self) -> State:
        return "portable" if self.remaining() else "native"

    def remaining(self) -> str:
        """Describe the work left for the device's host; "" where this host compiles native executables."""
        return ""

    def on_target(self) -> OnTargetCompiler | None:
        """The compiler of portable executables on the device's host (on_target.py); None if nothing is left to do."""
        return None

    def tuner(self) -> Tuner | None:
        """The kernel tuner on the device's host (tuning.py); None where there is nothing to tune."""
        return None

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        """Return what a server needs of its host; `recorded` are a manifest's options. Raises InputError."""
        return Hosting()

    def lacks(self) -> str:
        """Describe what this host lacks to run executables, packages excepted; "" if nothing."""
        return ""

    @property
    def costs(self) -> Costs:
        return Costs()

    @property
    def verification(self) -> VerificationPolicy:
        from llmc.compiler.verification.limits import VerificationPolicy  # at the top it would be in every key

        return VerificationPolicy()


@runtime_checkable
class VendorPrefill(Protocol):
    """A target whose vendor runtime prefills on another device and does the KV transfer itself."""

    def prefills_on(self, device: str) -> Mapping[str, str] | None:
        """Return the environment variables that select `device` for prefill when the one bundle is opened.

        None where the vendor does not support it: llmc then transfers the KV cache between two bundles.
        """


def _own(device: DeviceDescription, options: CompileOptions) -> dict[str, OptionValue]:
    """The given values of a device's own options, without defaults. Raises InputError for options of other targets."""
    known = {option.name: option for option in device.options}
    for name, value in options.own.items():
        if name in known:
            check_own(known[name], value, device.name)
        else:
            refuse_foreign(name, value, device.name)
    return {n: value for n, value in options.own.items() if n in known and value != known[n].default}


def shaping(device: DeviceDescription, options: CompileOptions) -> dict[str, str | int]:
    """Return the options that executables depend on, by name, except quantize and dtype, on which all depend."""
    apart = {option.name for option in device.options if not option.shapes_executable}
    found = {name: value for name, value in options.extensions.items() if name not in apart}
    return {name: repr(value) if isinstance(value, float) else value for name, value in found.items()}


def cache_for(target: Target, stages: Stages, options: CompileOptions) -> CacheShape:
    """Return the model's cache in the executor's layout. Raises CheckpointError for a cache that it cannot hold."""
    from llmc.compiler.architectures.shared.caches import cache_of

    return target.held_cache(cache_of(stages.checkpoint.config), stages.plan.limits, options)
