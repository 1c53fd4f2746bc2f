"""The contract of a target: what one device's compiler needs from llmc, and gives back.

The pipeline calls `resolve`, then `trace` and `lower` once (programs and weights: all that buckets share), then
`compile` once per distinct shape. What a device is lies in its `description`. Facets of a device that differs are
objects: `costs`, `verification`, `finisher`, `tuner`, `hosting`, and the topologies and requirements of the
description. A target is one file here and one line in the registry; fake.py is the tutorial.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from llmc.compiler.options import CompileOptions, Value
from llmc.compiler.targets.costs import Costs
from llmc.compiler.targets.declared import check_own, refuse_foreign
from llmc.compiler.targets.description import DeviceDescription
from llmc.compiler.targets.hosting import Hosting
from llmc.errors import InputError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.limits import Limits
    from llmc.compiler.architectures.shared.size import Weights
    from llmc.compiler.program.program import Program
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.finishing import Finisher
    from llmc.compiler.targets.tuning import Tuner
    from llmc.compiler.verification.policy import VerificationPolicy
    from llmc.runtime.cache_shape import CacheShape

State = Literal["native", "portable"]
ANY_PHASE = "any"
DIMENSIONS = ("batch", "query", "context")


@dataclass(frozen=True)
class Shape:
    """One executable's shape: fixed sizes, or None where a dimension stays dynamic; it serves `buckets` buckets."""

    phase: str
    batch: int | None
    query: int | None
    context: int | None
    buckets: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Batch, query and context of a shape whose sizes are all fixed."""
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
    """The case of a compile: a plan's limits and its facts (mean lengths of traffic), the model's configuration and its
    weights."""

    limits: Limits
    facts: Mapping[str, Any]
    config: Mapping[str, Any]
    weights: Sequence[Weights]

    @property
    def parameters(self) -> int:
        """How many weights."""
        return sum(one.count for one in self.weights)


@dataclass(frozen=True)
class Resolved:
    """The target that a device stands for, for one deployment.

    `requested`: the options as requested, for that target; `options`: the same with its defaults. `why`: the reason for
    that target, `decided`: the reason for defaults that the model decides; "" for none. `starter`: a target with its
    options, whose executables serve until the others are open.
    """

    target: Target
    requested: CompileOptions
    options: CompileOptions
    why: str = ""
    decided: str = ""
    starter: tuple[Target, CompileOptions] | None = None


class Fixed(NamedTuple):
    """The dimensions (of DIMENSIONS) that executables fix, and why they do or do not, for the summary and the manifest.
    The runtime pads only those."""

    dims: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Recorded:
    """What a manifest records for the host that opens the bundle: the executor, the instruction set that it needs, and
    options for the executor besides those that the pipeline writes."""

    executor: str
    features: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lowered:
    """Programs in the form that a device's compiler takes: what all executables of a compile share.

    `files` go into the bundle by name (digests in the store), `inputs` are files that only compiling needs, `forms` are
    those that show the lowered programs, `components` are the digests that an executable's key must name, `facts` are
    for the target itself, `stand_ins` are files that verification runs where this host does not run the bundle's
    own (the bundle does not get them), and `folder`, which the pipeline makes, has `files` under the names they will
    have in the bundle's blob folder. A target whose `compile` reads more has a subclass that names it. All of it can be
    sent to a worker process.
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
    """An executable: its bytes, and whether it is final for its device."""

    data: bytes
    state: State


class Target(ABC):
    """One device's compiler."""

    description: DeviceDescription

    @classmethod
    def of(cls, detail: str, settings: Settings) -> Target:
        """The target that `--device name:detail` requests, "" for the name alone; raises InputError."""
        if detail:
            name = cls.description.name
            raise InputError(f"--device {name}:{detail}: device {name} takes nothing behind its name")
        return cls()

    @cached_property
    def settings(self) -> Settings:
        """Those that it was opened with (`open_target`), or the environment's."""
        return Settings.from_environment()

    def resolve(self, options: CompileOptions, deployment: Deployment) -> Resolved:
        """The target that compiles, and its options; most devices stand only for themselves.

        Raises InputError for options that no target keeps.
        """
        return Resolved(self, options, self.configure(options))

    def configure(self, options: CompileOptions) -> CompileOptions:
        """Fill in defaults; raises InputError for what this target does not offer."""
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
        """What the manifest of a bundle with these options records."""
        return Recorded(self.description.executor, self.isa())

    def fixes(self, options: CompileOptions) -> Fixed:
        """Which dimensions an executable fixes."""
        if not options.specialise:
            return Fixed((), "one executable for all buckets, run at the exact shape")
        why = self.description.why_static
        return Fixed(DIMENSIONS, f"one executable per bucket: {why}" if why else "one executable per bucket")

    def shapes(self, buckets: Sequence[Bucket], options: CompileOptions) -> list[Shape]:
        """The distinct shapes that `buckets` need, largest first within each phase, as warm-up runs them."""
        if not self.fixes(options).dims:
            return [Shape(ANY_PHASE, None, None, None, len(buckets))]
        counted = Counter((b.phase, b.batch, b.query, b.context) for b in buckets)
        order = sorted(counted, key=lambda k: (k[0] != "prompt", *(-size for size in k[1:])))
        return [Shape(*key, counted[key]) for key in order]

    @abstractmethod
    def toolchain(self) -> dict[str, str]:
        """Names and versions of the packages that determine an executable; must not import them. Raises DeviceError."""

    def isa(self) -> tuple[str, ...]:
        """Instruction set an executable is tied to, if any."""
        return ()

    def held_cache(self, cache: CacheShape, limits: Limits, options: CompileOptions) -> CacheShape:
        """A model's cache as the executor holds it: with rings, where it can (`CacheShape.in_rings`)."""
        return cache

    def trace(self, stages: Stages, options: CompileOptions) -> Sequence[Program]:
        """The programs that are lowered, each a cached stage (compiler/program/stage.py); none where the device has its
        model built in. Raises CompileError, and CheckpointError for a model that the device cannot hold."""
        return ()

    @abstractmethod
    def lower(self, stages: Stages, programs: Sequence[Program], options: CompileOptions) -> Lowered:
        """Lower the programs and make weights, each as a cached stage. Raises UnfitError for options that do not fit,
        CompileError for a program that the device has no form for."""

    @abstractmethod
    def compile(self, lowered: Lowered, shape: Shape, options: CompileOptions) -> CompiledExecutable:
        """One executable. Runs in any thread, or in a worker process. Raises CompileError."""

    def show(self, lowered: Lowered, shapes: Sequence[Shape], options: CompileOptions) -> Iterator[tuple[str, str]]:
        """Lowered programs as text, each with its name; a device that lowers shape by shape shows those of `shapes`."""
        del shapes, options
        for name, path in lowered.forms.items():
            yield name, path.read_text()

    def analyse(
        self, stages: Stages, lowered: Lowered, files: Sequence[Path], options: CompileOptions
    ) -> dict[str, Any]:
        """Facts about the finished executables (their `files`), for the manifest and --json; empty if there are none.
        Raises CompileError if they do not fit their device.
        """
        return {}

    def describe(self, analysis: Mapping[str, Any]) -> list[str]:
        """The findings of `analyse`, in lines for people."""
        return []

    @property
    def state(self) -> State:
        """The state of executables that this host makes."""
        return "portable" if self.remaining() else "native"

    def remaining(self) -> str:
        """In words, the work that is left for the device's own host with portable executables; "" where this host makes
        native ones."""
        return ""

    def finisher(self) -> Finisher | None:
        """What makes native executables of portable ones on the device's own host (targets/finishing.py); None where a
        compile leaves nothing to finish."""
        return None

    def tuner(self) -> Tuner | None:
        """What times kernels on the device's own host (targets/tuning.py); None where there is nothing to choose."""
        return None

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        """What a server of its bundles needs of its host, for `llmc deploy`; `recorded` are a manifest's options.
        Raises InputError for a device that no single server has."""
        return Hosting()

    def lacks(self) -> str:
        """In words, what this host lacks to run executables, besides packages; "" if nothing."""
        return ""

    @property
    def costs(self) -> Costs:
        """What a bundle costs, before it is compiled."""
        return Costs()

    @property
    def verification(self) -> VerificationPolicy:
        """How executables are verified."""
        from llmc.compiler.verification.policy import VerificationPolicy  # at the top it would be in every key

        return VerificationPolicy()


@runtime_checkable
class VendorPrefill(Protocol):
    """A target whose vendor's runtime computes prompts on another device, and transfers keys and values by itself."""

    def prefills_on(self, device: str) -> Mapping[str, str] | None:
        """The environment variables that make it use `device`, where the bundle is opened; one bundle is enough then.

        None: not on that device; llmc transfers the KV cache between two bundles.
        """


def _own(device: DeviceDescription, options: CompileOptions) -> dict[str, Value]:
    """The given values of a device's own options, without defaults; raises InputError for options of other targets."""
    known = {option.name: option for option in device.options}
    for name, value in options.own.items():
        if name in known:
            check_own(known[name], value, device.name)
        else:
            refuse_foreign(name, value, device.name)
    return {n: value for n, value in options.own.items() if n in known and value != known[n].default}


def shaping(device: DeviceDescription, options: CompileOptions) -> dict[str, str | int]:
    """The options that executables depend on, by name, besides quantize and dtype, on which all depend."""
    apart = {option.name for option in device.options if not option.shapes_executable}
    found = {name: value for name, value in options.extensions.items() if name not in apart}
    return {name: repr(value) if isinstance(value, float) else value for name, value in found.items()}


def cache_for(target: Target, stages: Stages, options: CompileOptions) -> CacheShape:
    """The cache of the model that is compiled, as the executor holds it. Raises CheckpointError for one that cannot be
    held."""
    from llmc.compiler.architectures.shared.caches import cache_of

    return target.held_cache(cache_of(stages.checkpoint.config), stages.plan.limits, options)
