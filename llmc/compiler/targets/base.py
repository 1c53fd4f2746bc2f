"""The contract of a target: what one device's compiler needs from llmc, and gives back.

The pipeline calls `configure`, then `trace` and `lower` once (programs and weights: all that buckets share), then
`compile` once per distinct shape. A target is one file here and one line in the registry; fake.py is the tutorial.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from llmc.compiler.options import CompileOptions, Option, Value
from llmc.compiler.targets.costs import LOWER, TRACE, WEIGHTS, Cost, Verifying
from llmc.compiler.targets.declared import check_own, refuse_foreign
from llmc.compiler.targets.hardware import NEVER, Hardware
from llmc.compiler.targets.hosting import Hosting
from llmc.compiler.targets.reference import TRANSFORMERS, ReferenceModel
from llmc.compiler.targets.workers import Workers
from llmc.errors import InputError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.limits import Limits
    from llmc.buckets.plan import Plan
    from llmc.buckets.strategies.base import Range
    from llmc.compiler.architectures.shared.size import ModelSize, Weights
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.program.program import Program
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.deployment import Deployment
    from llmc.compiler.targets.finishing import Finisher
    from llmc.compiler.targets.tuning import Tuner
    from llmc.compiler.verification.limits import Limits as Bounds
    from llmc.runtime.accelerators import Cards
    from llmc.runtime.cache_shape import CacheShape

State = Literal["native", "portable"]
ANY_PHASE = "any"
DTYPE_BITS = {"f32": 32, "bf16": 16, "f16": 16}


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
class TopologyForm:
    """How a device's slices are named, for people: what stands behind the colon, an example, what the rows of their
    table are, and the last column: "GENERATION-SHAPE", "tpu:v5e-2x2", "generation", "shapes"."""

    written: str
    example: str
    row: str
    column: str


@dataclass(frozen=True)
class Lowered:
    """Programs in the form that a device's compiler takes: what all executables of a compile share.

    `files` go into the bundle by name (digests in the store), `inputs` are files that only compiling needs, `forms` are
    those that show the lowered programs, `components` are the digests that an executable's key must name, `facts` are
    for the target's analysis, `stand_ins` are files that verification runs where this host does not run the bundle's
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
class Executable:
    """An executable: its bytes, and whether it is final for its device."""

    data: bytes
    state: State


class Target(ABC):
    """One device's compiler."""

    name: ClassVar[str]
    executor: ClassVar[str]
    reference: ClassVar[ReferenceModel] = TRANSFORMERS
    quantisations: ClassVar[tuple[str, ...]] = ("none",)
    dtypes: ClassVar[tuple[str, ...]] = ("f32",)
    default_quantize: ClassVar[str] = "none"
    options: ClassVar[tuple[Option[Any], ...]] = ()
    also_called: ClassVar[tuple[str, ...]] = ()
    """What else people call the device; an error names it for that."""
    """The options that it takes beside those of every target, see compiler/options.py."""

    needs_processes: ClassVar[bool] = False
    """Compiling holds the interpreter lock, so that parallel jobs need processes."""

    fresh_process: ClassVar[tuple[str, ...]] = ()
    """Modules that a compiling process imports when it starts. If there are any, each executable is compiled in a
    process that compiled nothing before, so that its bytes do not depend on earlier compilations."""

    reads_files: ClassVar[bool] = True
    """Whether compiling reads `Lowered.folder`, so that another host that compiles has to have its files."""

    executable_seconds: ClassVar[float] = 0.25
    """Seconds for one more executable on this host, used while the store has no build of one."""

    executable_source: ClassVar[str] = "SmolLM2-135M on two cores (benchmarks/RESULTS.md)"
    device_seconds: ClassVar[float] = 0.0
    """Seconds that the device's own host still needs for each portable executable, by published measurements."""

    device_source: ClassVar[str] = ""
    verifying: ClassVar[Verifying] = Verifying(
        begin=Cost(fixed=0.5), opened=Cost(layers=0.15), step=Cost(parameters=0.01), tokens=Cost(parameters=1.1)
    )
    """Times of verification on two cores, used while the store has no measurement."""

    executable_bytes: ClassVar[int] = 150_000
    """About what an executable takes on disk, weights not counted."""

    graph_bytes_source: ClassVar[str] = "the activations of the largest layer for every token of the bucket"
    splits_weights: ClassVar[tuple[str, ...]] = ()
    """Flags that divide the weights over several devices."""

    verifies_each: ClassVar[bool] = True
    """Whether verification runs every executable, not only those of sampled buckets."""
    verifies_portable: ClassVar[bool] = False
    """Whether verification runs the portable halves on this host's CPU, even where such a device is here: another one
    of its sort, perhaps, than the one compiled for."""

    selects_adapters: ClassVar[bool] = False
    """Whether its graphs take LoRA adapters that each row of a step chooses (checkpoint/adapter_layout.py)."""

    config_only: ClassVar[bool] = False
    """Whether executables can be compiled before there are weights."""

    compile_needs: ClassVar[tuple[str, ...]] = ("torch", "transformers", "safetensors", "gguf", "onnx")
    """Packages that compiling imports, for `llmc devices`."""

    run_needs: ClassVar[tuple[str, ...]] = ("onnxruntime",)
    """Packages that running imports."""

    compile_extras: ClassVar[tuple[str, ...]] = ("compile",)
    """Extras of llmc that bring what compiling needs."""

    run_extras: ClassVar[tuple[str, ...]] = ()
    """Extras of llmc that bring what running needs."""

    most_sequences: ClassVar[int | None] = None
    """Sequences that its devices run at once, where that is theirs to say; a plan for it has as many by default."""

    topology_form: ClassVar[TopologyForm | None] = None
    """How its slices are named, where it has `topologies`."""

    listed: ClassVar[tuple[str, ...]] = ("",)
    """What stands behind its name in the rows that `llmc devices` has for it."""

    hardware: ClassVar[Hardware] = NEVER
    """Where its executables ran, of record."""

    guide: ClassVar[str] = ""
    """The page about it in docs/, if there is one."""

    def cards(self) -> tuple[Cards, ...]:
        """The cards that its executables are for, as a host shows them."""
        return ()

    @classmethod
    def topologies(cls) -> list[dict[str, Any]]:
        """The slices that it takes behind its name, for `llmc devices`; empty for most devices.

        Each has name, generation, shape, chips, devices, hosts and hbm_bytes_per_device.
        """
        return []

    def lacks(self) -> str:
        """In words, what this host lacks to run executables, besides packages; empty if nothing."""
        return ""

    def describe(self, analysis: Mapping[str, Any]) -> list[str]:
        """The findings of `analyse`, in lines for people."""
        return []

    @classmethod
    def of(cls, detail: str, settings: Settings) -> Target:
        """The target as `--device name:detail` asks for it, "" for the name alone; raises InputError."""
        if detail:
            raise InputError(f"--device {cls.name}:{detail}: device {cls.name} takes nothing behind its name")
        return cls()

    @cached_property
    def settings(self) -> Settings:
        """Those that it was opened with (`open_target`), or the environment's."""
        return Settings.from_environment()

    def require_supported(self, config: Mapping[str, Any]) -> None:
        """Raise CheckpointError when the model's architecture is not supported, naming those that are."""
        from llmc.compiler.architectures import require_supported

        require_supported(config)

    def require_consumed(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError, with the name, if the checkpoint has a tensor or key that nothing would read."""
        from llmc.compiler.frontend.consumed import require_consumed

        require_consumed(checkpoint)

    def configure(self, options: CompileOptions) -> CompileOptions:
        """Fill in defaults; raises InputError for what this target does not offer."""
        quantize = options.quantize or self.default_quantize
        dtype = self.default_dtype(quantize) if options.dtype == "auto" else options.dtype
        for what, value, known in (("quantize", quantize, self.quantisations), ("dtype", dtype, self.dtypes)):
            if value not in known:
                raise InputError(f"--{what} {value} is not offered for device {self.name}; offered: {', '.join(known)}")
        own = self._own(options)
        specialise = self.specialises_by_default if options.specialise is None else options.specialise
        return replace(options, quantize=quantize, dtype=dtype, specialise=specialise, own=own)

    def settle(self, options: CompileOptions, weights: Sequence[Weights]) -> tuple[CompileOptions, str]:
        """`configure` for a model of such weights, and the reason for the defaults that they decide; "" where they
        decide none."""
        del weights
        return self.configure(options), ""

    def _own(self, options: CompileOptions) -> dict[str, Value]:
        """The given values of its own options, without defaults; raises InputError for options of other targets."""
        known = {option.name: option for option in self.options}
        for name, value in options.own.items():
            if name in known:
                check_own(known[name], value, self.name)
            else:
                refuse_foreign(name, value, self.name)
        return {n: value for n, value in options.own.items() if n in known and value != known[n].default}

    def shaping(self, options: CompileOptions) -> dict[str, str | int]:
        """The options that executables depend on, by name, besides quantize and dtype, on which all depend."""
        apart = {option.name for option in self.options if not option.shapes_executable}
        found = {name: value for name, value in options.extensions.items() if name not in apart}
        return {name: repr(value) if isinstance(value, float) else value for name, value in found.items()}

    def resolve(self, options: CompileOptions, deployment: Deployment) -> tuple[Target, CompileOptions, str]:
        """The target that compiles, its options, and the reason for this target; most devices stand only for
        themselves.

        Raises InputError for options that no target keeps.
        """
        return self, options, ""

    def prefills_on(self, device: str) -> Mapping[str, str] | None:
        """Where the vendor's runtime of this device has prompts computed on `device` and hands them over by itself:
        the environment variables that make it, where the bundle is opened. One bundle is enough then.

        None: it does not; llmc hands prompts over between two bundles.
        """
        del device
        return None

    def compiled_with(self, device: str, recorded: Mapping[str, Any]) -> CompileOptions:
        """The options of a bundle of `device` whose manifest has the options `recorded`, as `configure` made them."""
        names = {"quantize", "dtype", "specialise", "sample_top_k", *(option.name for option in self.options)}
        return self.configure(CompileOptions.of(device, **{n: recorded[n] for n in names if n in recorded}))

    def default_dtype(self, quantize: str) -> str:
        """The dtype for `--dtype auto`: for storing and computing everything that is not quantised."""
        return "f32"

    @property
    @abstractmethod
    def specialises_by_default(self) -> bool:
        """Whether each bucket gets an executable of its own when the user does not say."""

    def executor_of(self, options: CompileOptions) -> str:
        """Name of the executor that runs what is compiled with these options."""
        return self.executor

    @abstractmethod
    def static_dims(self, options: CompileOptions) -> tuple[str, ...]:
        """Which of batch, query and context an executable fixes: the runtime pads only those."""

    @abstractmethod
    def choice(self, options: CompileOptions) -> str:
        """Why the executables are static or dynamic, for the summary and the manifest."""

    @abstractmethod
    def toolchain(self) -> dict[str, str]:
        """Names and versions of the packages that determine an executable; must not import them. Raises DeviceError."""

    def isa(self) -> tuple[str, ...]:
        """Instruction set an executable is tied to, if any."""
        return ()

    def needed_features(self, options: CompileOptions) -> tuple[str, ...]:
        """For the manifest, the instruction set that a host needs to open the bundle."""
        return self.isa()

    def trace(self, stages: Stages, options: CompileOptions) -> Sequence[Program]:
        """The programs that are lowered, each a cached stage (compiler/program/stage.py); none where the device has its
        model built in. Raises CompileError."""
        return ()

    @abstractmethod
    def lower(self, stages: Stages, programs: Sequence[Program], options: CompileOptions) -> Lowered:
        """Lower the programs and make weights, each as a cached stage. Raises UnfitError for options that do not fit,
        CompileError for a program that the device has no form for."""

    @abstractmethod
    def compile(self, lowered: Lowered, shape: Shape, options: CompileOptions) -> Executable:
        """One executable. Runs in any thread, or in a worker process. Raises CompileError."""

    def show(self, lowered: Lowered, shapes: Sequence[Shape], options: CompileOptions) -> Iterator[tuple[str, str]]:
        """Lowered programs as text, each with its name; a device that lowers shape by shape shows those of `shapes`."""
        del shapes, options
        for name, path in lowered.forms.items():
            yield name, path.read_text()

    def workers(self, jobs: int) -> Workers:
        """Processes that compile, `jobs` at once."""
        return Workers(jobs, self.fresh_process)

    @property
    def state(self) -> State:
        """The state of executables that this host makes."""
        return "native"

    def remaining(self) -> str:
        """In words, the work that is left for the device's own host with a portable executable; empty when native."""
        return ""

    def finisher(self) -> Finisher | None:
        """What makes native executables of portable ones on the device's own host (targets/finishing.py); None where a
        compile leaves nothing to finish."""
        return None

    def tuner(self) -> Tuner | None:
        """What times kernels on the device's own host (targets/tuning.py); None where there is nothing to choose."""
        return None

    def host_files(self, folder: Path, bundle: Path, plan: Plan) -> Mapping[str, str]:
        """Texts for the device's own host, by file name: what servers there read, and a job that finishes `bundle`.
        They will be written to `folder`. None for most devices."""
        return {}

    def hosting(self, recorded: Mapping[str, Any]) -> Hosting:
        """What a server of its bundles needs of its host, for `llmc deploy`; `recorded` are a manifest's options.
        Raises InputError for a device that no single server has."""
        return Hosting()

    def ranges(self, options: CompileOptions, limits: Limits) -> Mapping[str, Range]:
        """Ranges that its options decide in a plan for it, by name ("prompt_batch", "decode_context" …); most decide
        none. `options` are as asked for."""
        return {}

    def stage_costs(self, options: CompileOptions, buckets: Sequence[Bucket]) -> Mapping[str, Cost]:
        """Times on two cores of the stages that executables share, by kind; `options` are configured."""
        return {"trace": TRACE, "lower": LOWER, "weights": WEIGHTS}

    def memory(self, options: CompileOptions) -> tuple[int, str] | None:
        """The memory in bytes for weights, cache and graphs, and the name of the device that has it; None: unknown."""
        from llmc.runtime.host import host_memory  # an import at the top would be in the key of every executable

        found = host_memory()
        return None if found is None else (found, "of this host")

    def weight_bits(self, options: CompileOptions, weights: Weights) -> float:
        """Bits that a bundle holds for each of such weights, scales and copies for the kernels included.

        `options` are configured.
        """
        return DTYPE_BITS[options.dtype]

    def held_cache(self, cache: CacheShape, limits: Limits, options: CompileOptions) -> CacheShape:
        """A model's cache as the executor holds it: with rings, where it can (`CacheShape.in_rings`)."""
        return cache

    def held(self, stages: Stages, options: CompileOptions) -> CacheShape:
        """The same of the model that is compiled. Raises CheckpointError for one that cannot be held."""
        from llmc.compiler.architectures.shared.caches import cache_of

        return self.held_cache(cache_of(stages.checkpoint.config), stages.plan.limits, options)

    def cache_dtype(self, options: CompileOptions) -> str:
        """Precision of the KV cache."""
        return options.dtype

    def cache_bytes(self, options: CompileOptions) -> int:
        """Bytes of one value in the KV cache."""
        return 2 if options.dtype in ("bf16", "f16") else 4

    def cache_scale_bytes(self, options: CompileOptions) -> int:
        """Bytes beside these of each head's key or value of a token: its scale, where the cache has any."""
        return 0

    def devices(self, options: CompileOptions) -> int:
        """How many devices one graph is sharded over."""
        return 1

    def step_tokens(self, largest: int, options: CompileOptions) -> int:
        """New tokens of the largest step that an executable for every shape runs; `largest` is the largest bucket's."""
        return largest

    def graph_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """Bytes that one open executable keeps, weights and cache not counted; `bucket` is the largest step it runs."""
        return 4 * model.working_set * bucket.tokens

    def workspace_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """Bytes that such a step takes of a memory that all executables share: of several, the most counts."""
        return 0

    def open_at_once(self, shapes: Sequence[Shape], model: ModelSize, options: CompileOptions) -> Sequence[Shape]:
        """Those of a bundle's shapes whose executables are open at the same time."""
        return shapes

    def starter(self, options: CompileOptions) -> tuple[Target, CompileOptions] | None:
        """A target with its options, whose executables serve until this target's are open; None if there is none."""
        return None

    def manifest_options(self, options: CompileOptions) -> dict[str, Any]:
        """Further facts for the executor, besides those that the pipeline writes, for the manifest's options."""
        return {}

    def analyse(
        self, stages: Stages, lowered: Lowered, files: Sequence[Path], options: CompileOptions
    ) -> dict[str, Any]:
        """Facts about the finished executables (their `files`), for the manifest and --json; empty if there are none.
        Raises CompileError if they do not fit their device.
        """
        return {}

    def limits(self, options: CompileOptions) -> Bounds:
        """How close to the reference executables must be."""
        from llmc.compiler.verification.limits import limits

        most = options.get("max_kl")
        return limits(
            str(options.quantize), options.dtype, self.cache_dtype(options), None if most is None else float(most)
        )

    def shapes(self, buckets: Sequence[Bucket], options: CompileOptions) -> list[Shape]:
        """The distinct shapes that `buckets` need, largest first within each phase, as warm-up runs them."""
        static = self.static_dims(options)
        if not static:
            return [Shape(ANY_PHASE, None, None, None, len(buckets))]
        counted: Counter[tuple[str, int | None, int | None, int | None]] = Counter()
        for b in buckets:
            batch, query, context = self.shape_of(b)
            counted[
                b.phase,
                batch if "batch" in static else None,
                query if "query" in static else None,
                context if "context" in static else None,
            ] += 1
        order = sorted(counted, key=lambda k: (k[0] != "prompt", -(k[1] or 0), -(k[2] or 0), -(k[3] or 0)))
        return [Shape(*key, counted[key]) for key in order]

    def shape_of(self, bucket: Bucket) -> tuple[int, int, int]:
        """(batch, query, context) of the executable that serves `bucket`."""
        return bucket.batch, bucket.query, bucket.context
