"""ONNX Runtime, on this host's CPU.

Measured here (benchmarks/RESULTS.md): static shapes gain nothing on this runtime, one dynamic executable runs every
shape as fast without padding, opens faster and holds less. So the default is one executable for all buckets;
`--specialise` makes one a bucket.

Quantised matrices lie in panels that llmc's own operators read (onnxruntime/kernels), where the CPU has what those
need; the bundle holds their library. Elsewhere, or with `--kernels onnxruntime`, the runtime's own kernels run. Then
the weights file also holds their packed form, as that of specialised bundles does: executables share it, and a process
reaches its first token sooner by what packing at open would take.

Quantisations (formats.py): int8; keep, the checkpoint's own blocks exactly and 8 bits for matrices that it has
no blocks of; int4, 4 bits with an offset for each block, and 8 for the embedding and the head. What the checkpoint has
in 4 bits already is kept by int4.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llmc.artifacts.bundle.kernel_sets import best_set, common_isa, sets_in
from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.architectures.shared.names import OUTER
from llmc.compiler.checkpoint.base import stored_forms
from llmc.compiler.code import code_digest
from llmc.compiler.options import CompileOptions, Option
from llmc.compiler.program.program import GraphProgram, Program
from llmc.compiler.program.stage import traced_graph
from llmc.compiler.stages import Stages, toolchain, version_of
from llmc.compiler.targets.base import Executable, Lowered, Shape, Target
from llmc.compiler.targets.calibration import (
    CALIBRATE,
    HEAD_BITS,
    MAX_KL,
    calibrated,
    calibration_costs,
    mixed_lines,
    require_calibratable,
)
from llmc.compiler.targets.costs import Cost
from llmc.compiler.targets.hardware import Hardware
from llmc.compiler.targets.onnxruntime.for_cpus import (
    cache_default,
    libraries,
    sets_of,
    verified_by,
    with_cpus,
)
from llmc.compiler.targets.onnxruntime.kernels.limits import KEYS
from llmc.compiler.targets.onnxruntime.memory import arena_bytes, kernels_arena_bytes, session_bytes
from llmc.compiler.targets.onnxruntime.options import (
    ACTIVATIONS,
    BF16,
    CPU_OPTION,
    F16,
    GROUP_SIZE,
    INT8,
    KERNELS_OPTION,
    KV_CACHE_DTYPE,
    LLMC,
    NEEDED_CPUS,
    PROMPT_DTYPE,
    check_activations,
    check_group_size,
    kept_in,
    ours,
    prompts_in,
    with_dtypes,
)
from llmc.compiler.weights.stage import weights_stage
from llmc.errors import CompileError, InputError
from llmc.runtime.cache_shape import SCALE_BYTES
from llmc.runtime.host import (
    KERNELS_PROMPT_CHUNK,
    PROMPT_CHUNK,
    ROLLING_ROOM,
    cpu_features,
    host_features,
    rolling_ring,
)

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.workspace import Workspace
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.limits import Limits
    from llmc.compiler.architectures.shared.size import ModelSize, Weights
    from llmc.compiler.targets.onnxruntime.formats import OnnxOptions
    from llmc.runtime.accelerators import Cards
    from llmc.runtime.cache_shape import CacheShape
    from llmc.settings import Settings

INT8_BLOCK = 64
BLOCK = 32
TWICE_BITS = {"q8": 9 + 9.7, "q4": 6 + 7}
"""Of our own blocks (onnxruntime/formats.py), as they are and packed for the kernels (benchmarks/RESULTS.md)."""

ADDED_KL = 0.005
"""What activations, an embedding and a head in 8 bits add to the divergence of int4 (verification/limits.py, keep)."""


@dataclass(frozen=True)
class OnnxLowered(Lowered):
    """And the ring of each key and value that has one, by its entry ("k3")."""

    rings: Mapping[str, int]


class OnnxRuntimeTarget(Target):
    """See the module's docstring."""

    name: ClassVar[str] = "onnxruntime"
    also_called: ClassVar[tuple[str, ...]] = ("ort", "onnx")
    executor: ClassVar[str] = "onnxruntime"
    quantisations: ClassVar[tuple[str, ...]] = ("none", "int8", "int4", "keep")
    default_quantize: ClassVar[str] = "int8"
    hardware: ClassVar[Hardware] = Hardware(
        "x86-64 with AMX (Intel Xeon), with AVX-512 and with AVX2 (AMD EPYC)",
        "ONNX Runtime 1.31.1",
        "2026-11",
        "benchmarks/RESULTS.md",
    )
    guide: ClassVar[str] = "docs/cpu.md"
    selects_adapters: ClassVar[bool] = True
    options: ClassVar[tuple[Option[Any], ...]] = (
        KERNELS_OPTION, CPU_OPTION, GROUP_SIZE, KV_CACHE_DTYPE, PROMPT_DTYPE, ACTIVATIONS, CALIBRATE, MAX_KL, HEAD_BITS,
    )  # fmt: skip
    graph_bytes_source: ClassVar[str] = "graph objects of each session, and the arena of the largest step, as measured"

    def __init__(self, cpus: str = "") -> None:
        """For the CPUs that stand behind the device's name, with commas; "" for none."""
        self._cpus = cpus

    @classmethod
    def of(cls, detail: str, settings: Settings) -> Self:
        """Behind the name stand CPUs, as --cpu takes them."""
        return cls(detail)

    def cards(self) -> tuple[Cards, ...]:
        """The CPU."""
        from llmc.runtime.accelerators import CPU

        return (CPU,)

    def configure(self, options: CompileOptions) -> CompileOptions:
        """As the contract says; kernels are llmc's where the CPU runs them and anything is quantised."""
        options = super().configure(options)
        require_calibratable(options)
        options = with_cpus(options, self._cpus)
        asked, cpus = KERNELS_OPTION.of(options), CPU_OPTION.of(options)
        fits = best_set(self.isa()) is not None if cpus is None else bool(sets_of(options, self.isa()))
        if asked is not None and options.quantize == "none":
            raise InputError(f"--kernels {asked} is for quantised matrices; --quantize none leaves none")
        if asked == LLMC and options.specialise:
            raise InputError("--kernels llmc runs any shape as it is; leave out --specialise, or --kernels")
        if asked == LLMC and not fits:
            raise InputError(
                f"--kernels llmc needs Linux and a CPU with {NEEDED_CPUS}; this one has "
                f"{', '.join(self.isa())}; use --kernels onnxruntime, or name the CPU that it is for with --cpu"
            )
        default = LLMC if fits and not options.specialise and options.quantize != "none" else None
        kernels = asked or default
        if cpus is not None and kernels != LLMC:
            raise InputError("--cpu is for llmc's kernels, and none are built: quantise, without --specialise")
        sets = sets_of(options, self.isa()) if kernels == LLMC else ()
        prompts = BF16 if sets and all(one.has_bf16_tiles for one in sets) else INT8
        options = with_dtypes(options.changed(kernels=kernels), cache_default(sets, self.isa()), prompts)
        if kernels == LLMC and options.verify != "none":
            verified_by(options, self.isa())
        check_activations(options)
        check_group_size(options)
        return options

    def settle(self, options: CompileOptions, weights: Sequence[Weights]) -> tuple[CompileOptions, str]:
        """As the contract says; llmc's kernels keep a GGUF's own blocks."""
        from llmc.compiler.targets.onnxruntime.gguf_default import KEPT, in_gguf_blocks  # in no key of a lowering

        if options.quantize is None and GROUP_SIZE.of(options) is None and in_gguf_blocks(weights):
            kept = self.configure(replace(options, quantize="keep"))
            if ours(kept):
                return kept, KEPT
        return super().settle(options, weights)

    def executor_of(self, options: CompileOptions) -> str:
        """With llmc's kernels rows lie end to end."""
        return "onnxruntime-llmc" if ours(options) else self.executor

    def manifest_options(self, options: CompileOptions) -> dict[str, Any]:
        """What llmc's kernels keep keys and values in."""
        return {KV_CACHE_DTYPE.name: F16} if kept_in(options) == F16 else {}

    def cache_dtype(self, options: CompileOptions) -> str:
        """bf16 and int8; float16 is held to what float32 is."""
        kept = kept_in(options)
        return super().cache_dtype(options) if kept in (None, F16) else str(kept)

    def cache_bytes(self, options: CompileOptions) -> int:
        """llmc's kernels keep 16 bits, or codes."""
        return {None: super().cache_bytes(options), INT8: 1}.get(kept_in(options), 2)

    def cache_scale_bytes(self, options: CompileOptions) -> int:
        """Those of codes."""
        return SCALE_BYTES if kept_in(options) == INT8 else 0

    @property
    def specialises_by_default(self) -> bool:
        """No: static shapes were measured and gain nothing."""
        return False

    def static_dims(self, options: CompileOptions) -> tuple[str, ...]:
        """All three when specialised, else none."""
        return ("batch", "query", "context") if options.specialise else ()

    def choice(self, options: CompileOptions) -> str:
        """The measurement behind the default."""
        if ours(options):
            return "one executable for all buckets, its rows laid end to end: nothing is padded"
        if options.specialise:
            return "one executable per bucket, as asked for with --specialise; this target measured no gain from it"
        return "one executable for all buckets, run at the exact shape: this target measured no gain from static shapes"

    def toolchain(self) -> dict[str, str]:
        """The runtime decides layouts and kernels, the other writes the graph."""
        return {package: version_of(package) for package in ("onnxruntime", "onnx")}

    def isa(self) -> tuple[str, ...]:
        """What llmc's kernels are chosen by."""
        return cpu_features()

    def held_cache(self, cache: CacheShape, limits: Limits, options: CompileOptions) -> CacheShape:
        """llmc's kernel reads rings of whole blocks of keys, which hold a window and what a step adds. ONNX Runtime's
        reads tokens end to end: its executor moves them down."""
        if kept_in(options) == INT8 and not cache.kv:
            raise InputError(
                f"{KV_CACHE_DTYPE.flag} {INT8}: the model keeps states and no keys or values; leave it out"
            )
        if not ours(options):
            return cache.in_rings(PROMPT_CHUNK, limits.max_model_len - ROLLING_ROOM)
        step = min(self.step_tokens(limits.max_num_batched_tokens, options), limits.max_model_len)
        return cache.in_rings(step, limits.max_model_len, KEYS)

    def needed_features(self, options: CompileOptions) -> tuple[str, ...]:
        """With llmc's kernels what these are written in: the library is built for no more on any host. ONNX Runtime
        packs weights for all that this CPU has."""
        return common_isa(sets_of(options, self.isa())) if ours(options) else host_features()

    def shape_of(self, bucket: Bucket) -> tuple[int, int, int]:
        """A prompt chunk over a past runs row by row: the attention kernel takes one row there."""
        batch = 1 if bucket.phase == "prompt" and bucket.context else bucket.batch
        return batch, bucket.query, bucket.context

    def weight_bits(self, options: CompileOptions, weights: Weights) -> float:
        """For the runtime's kernels, quantised weights are there twice; its experts stay in float32."""
        if options.quantize == "none" or (weights.experts and not ours(options)):
            return super().weight_bits(options, weights)
        kept = weights.stored
        if kept is None or not _keeps(str(options.quantize), kept, weights.outer):
            four = options.quantize == "int4" and not (weights.outer and HEAD_BITS.of(options) != 4)
            if ours(options):
                return (4 if four else 8) + 16 * (1 + four) / (GROUP_SIZE.of(options) or BLOCK)
            return TWICE_BITS["q4" if four else "q8"]
        beside, block = 2 if kept.offsets else 1, min(kept.block, BLOCK)
        if ours(options):
            from llmc.compiler.targets.onnxruntime.formats import panel_bits

            return panel_bits(kept) + 16 * beside / block
        return 2 * kept.bits + 32 * (beside + 2) / block

    def stage_costs(self, options: CompileOptions, buckets: Sequence[Bucket]) -> Mapping[str, Cost]:
        """llmc's kernels are built once for all models; for the runtime's, weights are packed."""
        more = calibration_costs(options)
        if ours(options):
            more["kernels"] = Cost(fixed=20.0)
        elif options.specialise or options.quantize != "none":
            more["pack"] = Cost(parameters=3.0)
        return {**super().stage_costs(options, buckets), **more}

    def step_tokens(self, largest: int, options: CompileOptions) -> int:
        """Where any shape runs, long prompts run in chunks."""
        return min(largest, KERNELS_PROMPT_CHUNK if ours(options) else PROMPT_CHUNK)

    def graph_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """ONNX Runtime's graph objects, and the matrices that it packs when it opens what was not packed before."""
        quantised = options.quantize != "none"
        packed = 0 if quantised or options.specialise else 4 * model.parameters
        return session_bytes(model, quantised) + packed

    def workspace_bytes(self, model: ModelSize, bucket: Bucket, options: CompileOptions) -> int:
        """The arena that all sessions share."""
        if not ours(options):
            return arena_bytes(model, bucket.tokens)
        return kernels_arena_bytes(model, bucket.tokens, prompts_in(options) if bucket.phase == "prompt" else INT8)

    def trace(self, stages: Stages, options: CompileOptions) -> Sequence[Program]:
        """Once, for every shape and quantisation."""
        return [traced_graph(stages)]

    def lower(self, stages: Stages, programs: Sequence[Program], options: CompileOptions) -> Lowered:
        """Fuse and lower, make the weights file, and pack it where that pays."""
        own, (stages, mixed) = ours(options), calibrated(stages, options, ADDED_KL)
        formats = replace(
            self._onnx_options(stages, str(options.quantize), mixed.wide, panels=own),
            head_bits=mixed.head_bits, activations=ACTIVATIONS.of(options) is None, cache=kept_in(options) or F16,
            prompts=prompts_in(options),
        )  # fmt: skip
        formats = replace(formats, fold=formats.fold and formats.activations)
        if (group := GROUP_SIZE.of(options)) is not None:
            formats = replace(formats, block=group, normed=group)
        held = self.held(stages, options)
        made = self._lower(stages, programs, replace(formats, rolls=not own and bool(held.rewind.rings)))
        weights = weights_stage(stages, made.outputs["recipes"], made.outputs["tables"])
        if not own and (options.specialise or options.quantize != "none"):
            weights = self._pack(stages, made, weights)
        file = weights.outputs["weights"]
        kernels = libraries(stages, sets_of(options, self.isa())) if own else {}
        stand_in = verified_by(options, self.isa()) if own and options.verify != "none" else None
        model = stages.path(made.outputs["model"])
        rings = {t.entry: t.ring for t in held.kv if t.ring is not None}
        return OnnxLowered(
            files={"weights": file.digest, **kernels},
            components={
                "lowered": made.outputs["model"].digest,
                "weights": file.digest,
                "placements": weights.outputs["placements"].digest,
                **({"rings": json.dumps(rings)} if options.specialise and rings else {}),
                **kernels,
            },
            inputs={
                "model": model,
                "placements": stages.path(weights.outputs["placements"]),
                "recipes": stages.path(made.outputs["recipes"]),
            },
            forms={"model": model},
            rings=rings,
            facts=mixed.facts,
            stand_ins=libraries(stages, [stand_in]) if stand_in is not None else {},
        )

    def analyse(
        self, stages: Stages, lowered: Lowered, files: Sequence[Path], options: CompileOptions
    ) -> dict[str, Any]:
        """How much of the checkpoint's own codes was kept, and what is in 8 bits for a bound."""
        from llmc.compiler.weights.kept import kept_in

        return {**kept_in(lowered.inputs["recipes"].read_bytes(), stages.checkpoint), **lowered.facts}

    def describe(self, analysis: Mapping[str, Any]) -> list[str]:
        """A line of each."""
        from llmc.compiler.weights.kept import kept_lines

        return [*kept_lines(analysis), *mixed_lines(analysis)]

    def show(self, lowered: Lowered, shapes: Sequence[Shape], options: CompileOptions) -> Iterator[tuple[str, str]]:
        """The ONNX model for every shape, in ONNX's text form."""
        import onnx

        for name, path in lowered.forms.items():
            yield name, onnx.printer.to_text(onnx.load_from_string(path.read_bytes()))

    def _onnx_options(
        self, stages: Stages, quantize: str, wide: frozenset[str], *, panels: bool
    ) -> OnnxOptions:  # fmt: skip
        from llmc.compiler.targets.onnxruntime.formats import OnnxOptions

        if quantize in ("none", "int8"):
            return OnnxOptions(INT8_BLOCK if quantize == "int8" else 0, panels=panels)
        from llmc.compiler.weights.kept import require_codes

        if quantize == "keep":
            require_codes(stages.checkpoint)
        stored = stored_forms(stages.checkpoint)
        kept = {n: form for n, form in stored.items() if _keeps(quantize, form, n in OUTER) and n not in wide}
        fold, bits = not panels and self._folds(stages), 4 if quantize == "int4" else 8
        return OnnxOptions(BLOCK, bits=bits, stored=kept, wide=wide, fold=fold, panels=panels)

    def _folds(self, stages: Stages) -> bool:
        """Whether packed matrices take in offsets here."""
        components = {
            **toolchain(*self.toolchain()), "isa": " ".join(host_features()), "code": code_digest(self._folds),
        }  # fmt: skip

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            from llmc.compiler.targets.onnxruntime.packing import folds_offsets

            workspace.meta["folds"] = folds_offsets()
            return {}

        return bool(stages.run("layout", components, build).meta["folds"])

    def _lower(self, stages: Stages, programs: Sequence[Program], options: OnnxOptions) -> Entry:
        (program,) = programs
        assert isinstance(program, GraphProgram)
        components = {
            **program.components,
            **options.components,
            **toolchain("onnx", "numpy", python=True),
            "code": code_digest(self._lower),
        }

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            from llmc.compiler.program.fuse import fuse
            from llmc.compiler.targets.onnxruntime.kernels.panels import LANES
            from llmc.compiler.targets.onnxruntime.to_onnx import to_onnx
            from llmc.compiler.weights.recipes import written

            fused = fuse(program.graph(), LANES if options.panels else 0, adapted=options.panels)
            made = to_onnx(fused, options)
            files = {
                "model": made.model.SerializeToString(deterministic=True),
                "folded": json.dumps(made.folded, sort_keys=True).encode(),
                **written(made.recipes, made.tables),
            }
            return {name: workspace.put_bytes(data) for name, data in files.items()}

        return stages.run("lower", components, build)

    def _pack(self, stages: Stages, lowered: Entry, weights: Entry) -> Entry:
        components = {
            "lowered": lowered.outputs["model"].digest,
            "folded": lowered.outputs["folded"].digest,
            "weights": weights.outputs["weights"].digest,
            "placements": weights.outputs["placements"].digest,
            **toolchain(*self.toolchain()),
            "isa": " ".join(host_features()),
            "code": code_digest(self._pack),
        }

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            from llmc.compiler.targets.onnxruntime.packing import pack_weights

            packed, placements = pack_weights(
                stages.path(lowered.outputs["model"]).read_bytes(), stages.path(weights.outputs["weights"]),
                json.loads(stages.store.get_bytes(weights.outputs["placements"].digest)), workspace.folder,
                json.loads(stages.store.get_bytes(lowered.outputs["folded"].digest)),
            )  # fmt: skip
            return {
                "weights": workspace.put_file(packed),
                "placements": workspace.put_bytes(json.dumps(placements, sort_keys=True).encode()),
            }

        return stages.run("pack", components, build)

    def compile(self, lowered: Lowered, shape: Shape, options: CompileOptions) -> Executable:
        """Fix the shape, point at the weights, and open the result once to prove that the runtime takes it."""
        from llmc.artifacts.digest import parse
        from llmc.compiler.targets.onnxruntime.onnx_model import add_top, bind, load_model, place, place_symbols

        assert isinstance(lowered, OnnxLowered)
        model = load_model(lowered.inputs["model"].read_bytes())
        sizes = {"B": shape.batch, "Q": shape.query, "R": shape.batch}
        if shape.context is not None and shape.query is not None:
            tokens = shape.context + shape.query
            for entry, symbol in place_symbols(model).items():
                ring = lowered.rings.get(entry)
                sizes[symbol] = tokens if ring is None else min(tokens, rolling_ring(ring, shape.query))
        bound = bind(add_top(model, options.sample_top_k), {k: v for k, v in sizes.items() if v is not None})
        placements = json.loads(lowered.inputs["placements"].read_bytes())
        data: bytes = place(bound, parse(lowered.files["weights"]), placements).SerializeToString(deterministic=True)
        if not ours(options):
            try_opening(data, lowered.folder, str(shape))
        elif here := best_set(self.isa(), [s.name for s in sets_in(lowered.files)]):
            try_opening(data, lowered.folder, str(shape), str(lowered.folder / parse(lowered.files[here.file])))
        return Executable(data, "native")


def _keeps(quantize: str, form: BlockForm, outer: bool) -> bool:
    """Whether a matrix keeps the checkpoint's blocks; int4 keeps those of 4 bits, and those of embedding and head."""
    return quantize == "keep" or (quantize == "int4" and (form.bits == 4 or outer))


def try_opening(data: bytes, folder: Path, what: str, library: str | None = None) -> None:
    """Open executable bytes with ONNX Runtime; weights and `library` are in `folder` under their bundle names."""
    from llmc.runtime.executors.onnxruntime.session import open_session

    try:
        open_session(data, library=library, session__model_external_initializers_file_folder_path=str(folder))
    except Exception as e:
        raise CompileError(f"ONNX Runtime refuses the executable for {what}: {e}") from e
