"""ONNX Runtime on this host's CPU: one executable for all buckets, or with `--specialise` one a bucket.

Static shapes gain nothing on this runtime (benchmarks/RESULTS.md). Where the CPU supports llmc's operators
(onnxruntime/kernels), quantized matrices use their panels, and the bundle holds their library. Elsewhere, or with
`--kernels onnxruntime`, the runtime's own kernels run. The weights file then also holds their packed form, as in
specialised bundles: executables share it, and a process need not pack weights before its first token.

Quantizations (formats.py): int8; keep, the checkpoint's own blocks exactly and 8 bits for matrices without blocks;
int4, 4 bits with an offset for each block, and 8 for the embedding and lm_head. int4 keeps a checkpoint's 4-bit blocks.
Only the libraries' keys contain the kernel sources, so their builder is imported on use.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS, KernelSet, best_set, common_isa, sets_in
from llmc.compiler.architectures.shared.names import EMBED_LM_HEAD
from llmc.compiler.checkpoint.base import stored_forms
from llmc.compiler.code import code_digest
from llmc.compiler.options import CompileOptions
from llmc.compiler.program.program import GraphProgram, Program, traced_graph
from llmc.compiler.stages import Stages, toolchain, version_of
from llmc.compiler.targets.base import CompiledExecutable, Fixed, Lowered, Recorded, Resolved, Shape, Target, cache_for
from llmc.compiler.targets.calibration import (
    CALIBRATE,
    LM_HEAD_BITS,
    MAX_KL,
    Mixed,
    calibrated,
    mixed_lines,
    require_calibratable,
)
from llmc.compiler.targets.description import TRACING, DeviceDescription, Hardware, Requirements
from llmc.compiler.targets.onnxruntime.options import (
    ACTIVATIONS,
    BF16,
    BLOCK,
    CPU_OPTION,
    F16,
    GROUP_SIZE,
    INT8,
    KERNELS_OPTION,
    KEYS,
    KV_CACHE_DTYPE,
    LLMC,
    NEEDED_CPUS,
    PROMPT_DTYPE,
    check_activations,
    check_group_size,
    keeps,
    kept_in,
    ours,
    prompts_in,
    with_dtypes,
)
from llmc.compiler.weights.stage import weights_stage
from llmc.errors import CompileError, InputError
from llmc.runtime.accelerators import CPU
from llmc.runtime.host import PROMPT_CHUNK, ROLLING_ROOM, cpu_features, host_features, rolling_ring

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.workspace import Workspace
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.limits import Limits
    from llmc.compiler.targets.base import Deployment
    from llmc.compiler.targets.costs import Costs
    from llmc.compiler.targets.onnxruntime.formats import OnnxOptions
    from llmc.compiler.verification.limits import VerificationPolicy
    from llmc.runtime.cache_shape import CacheShape
    from llmc.settings import Settings


def with_cpus(options: CompileOptions, named: str) -> CompileOptions:
    """Return `options` for the CPUs behind the device's name, "" for none. Raises InputError if --cpu names others."""
    requested = CPU_OPTION.of(options)
    if not named or requested == named:
        return options
    if requested is not None:
        raise InputError(
            f"--device {options.device} and {CPU_OPTION.flag} {requested}: both name CPUs; give all of them "
            f"once, as {CPU_OPTION.flag} {named},{requested}"
        )
    return options.changed(**{CPU_OPTION.name: named})


def sets_of(options: CompileOptions, here: Collection[str]) -> tuple[KernelSet, ...]:
    """Return the kernel variants of the requested CPUs, fastest first; `here`: the features of this host."""
    from llmc.compiler.targets.onnxruntime.kernels.build import NATIVE, sets_for

    return sets_for(CPU_OPTION.of(options) or NATIVE, here)


def cache_default(sets: Collection[KernelSet], here: Collection[str]) -> str:
    """Return bf16 where all of these variants and this host are fast with it, and have the same results."""
    own = {one.own_bf16_sums for one in sets}
    verifiable = own == {False} or any(one.runs_on(here) for one in sets)
    return BF16 if len(own) == 1 and verifiable and all(one.fast_bf16_attention for one in sets) else F16


def verified_by(options: CompileOptions, here: Collection[str]) -> KernelSet | None:
    """Return the variant that verifies a bundle whose variants this host cannot run; None if it runs one.

    Variants with the same bits differ only in bfloat16 attention (docs/cpu.md). Raises InputError where this host runs
    no such variant.
    """
    wanted = sets_of(options, here)
    if any(one.runs_on(here) for one in wanted):
        return None
    rounded = kept_in(options) == BF16
    runs = [one for one in KERNEL_SETS if one.runs_on(here) and not (rounded and one.own_bf16_sums)]
    if not runs or (rounded and any(one.own_bf16_sums for one in wanted)):
        raise InputError(
            f"{CPU_OPTION.flag} {CPU_OPTION.of(options)}: this host cannot run kernels with the same results as "
            f"{', '.join(one.name for one in wanted)}, so nothing could be verified here; name native too, or use "
            "--verify none"
        )
    return runs[0]


def libraries(stages: Stages, sets: Collection[KernelSet]) -> Mapping[str, str]:
    """Build the operator library of each variant: its digest in the store by the name of the bundle's file."""
    return {kernels.file: _library(stages, kernels).digest for kernels in sets}


def _library(stages: Stages, kernels: KernelSet) -> Blob:
    from llmc.compiler.targets.onnxruntime.kernels.build import build as build_library

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        with tempfile.TemporaryDirectory(dir=workspace.folder) as folder:
            return {kernels.file: workspace.put_file(build_library(Path(folder), kernels.name))}

    components = {
        **toolchain("ziglang"), "set": kernels.name, "code": code_digest(build_library), "state": "native",
    }  # fmt: skip
    return stages.run("kernels", components, build).outputs[kernels.file]


INT8_BLOCK = 64

ADDED_KL = 0.005
"""KL divergence that 8-bit activations, embedding and lm_head add to int4's (verification/limits.py, keep)."""


@dataclass(frozen=True)
class OnnxLowered(Lowered):
    """Adds the ring-buffer size of each key and value that has one, by its entry ("k3")."""

    rings: Mapping[str, int]


class OnnxRuntimeTarget(Target):
    """`--device onnxruntime[:CPU,…]`."""

    description = DeviceDescription(
        "onnxruntime",
        "onnxruntime",
        also_called=("ort", "onnx"),
        quantisations=("none", "int8", "int4", "keep"),
        default_quantize="int8",
        options=(
            KERNELS_OPTION, CPU_OPTION, GROUP_SIZE, KV_CACHE_DTYPE, PROMPT_DTYPE, ACTIVATIONS, CALIBRATE, MAX_KL,
            LM_HEAD_BITS,
        ),
        selects_adapters=True,
        requirements=Requirements((*TRACING, "gguf", "onnx"), ("onnxruntime",)),
        hardware=Hardware(
            "x86-64 with AMX (Intel Xeon), with AVX-512 and with AVX2 (AMD EPYC)",
            "ONNX Runtime 1.31.1",
            "2026-11",
            "benchmarks/RESULTS.md",
        ),
        guide="docs/cpu.md",
        accelerators=(CPU,),
    )  # fmt: skip

    def __init__(self, cpus: str = "") -> None:
        self._cpus = cpus

    @classmethod
    def of(cls, detail: str, settings: Settings) -> Self:
        return cls(detail)

    @property
    def costs(self) -> Costs:
        from llmc.compiler.targets.onnxruntime.costs import OnnxRuntimeCosts

        return OnnxRuntimeCosts()

    @property
    def verification(self) -> VerificationPolicy:
        """Depends on the cache precision: bf16 and int8; float16 has float32's limits."""
        from llmc.compiler.verification.limits import VerificationPolicy

        return VerificationPolicy(
            runs_as=_runs_as,
            cache_dtype=lambda o: o.dtype if (kept := kept_in(o)) in (None, F16) else str(kept),
        )

    def configure(self, options: CompileOptions) -> CompileOptions:
        """Uses llmc's kernels where the CPU runs them and anything is quantized."""
        options = super().configure(options)
        require_calibratable(options)
        options = with_cpus(options, self._cpus)
        requested, cpus = KERNELS_OPTION.of(options), CPU_OPTION.of(options)
        fits = best_set(self.isa()) is not None if cpus is None else bool(sets_of(options, self.isa()))
        if requested is not None and options.quantize == "none":
            raise InputError(f"--kernels {requested} is for quantised matrices; --quantize none leaves none")
        if requested == LLMC and options.specialise:
            raise InputError("--kernels llmc runs any shape; leave out --specialise, or --kernels")
        if requested == LLMC and not fits:
            raise InputError(
                f"--kernels llmc needs Linux and a CPU with {NEEDED_CPUS}; this one has "
                f"{', '.join(self.isa())}; use --kernels onnxruntime, or name the CPU that it is for with --cpu"
            )
        default = LLMC if fits and not options.specialise and options.quantize != "none" else None
        kernels = requested or default
        if cpus is not None and kernels != LLMC:
            raise InputError("--cpu is for llmc's kernels, and none are built: quantize, and leave out --specialise")
        sets = sets_of(options, self.isa()) if kernels == LLMC else ()
        prompts = BF16 if sets and all(one.has_bf16_tiles for one in sets) else INT8
        options = with_dtypes(options.changed(kernels=kernels), cache_default(sets, self.isa()), prompts)
        if kernels == LLMC and options.verify != "none":
            verified_by(options, self.isa())
        check_activations(options)
        check_group_size(options)
        return options

    def resolve(self, options: CompileOptions, deployment: Deployment) -> Resolved:
        """llmc's kernels keep a GGUF's own blocks."""
        from llmc.compiler.targets.onnxruntime.options import KEPT, in_gguf_blocks  # in no key of a lowering

        if options.quantize is None and GROUP_SIZE.of(options) is None and in_gguf_blocks(deployment.weights):
            kept = self.configure(replace(options, quantize="keep"))
            if ours(kept):
                return Resolved(self, options, kept, decided=KEPT)
        return super().resolve(options, deployment)

    def recorded(self, options: CompileOptions) -> Recorded:
        """llmc's kernels have another executor, since rows are packed, and their libraries' instruction set."""
        if not ours(options):
            return Recorded(self.description.executor, host_features())
        kept = {KV_CACHE_DTYPE.name: F16} if kept_in(options) == F16 else {}
        return Recorded("onnxruntime-llmc", common_isa(sets_of(options, self.isa())), kept)

    def fixes(self, options: CompileOptions) -> Fixed:
        if ours(options):
            return Fixed((), "one executable for all buckets, its rows packed without padding")
        dims, _ = super().fixes(options)
        if dims:
            why = "one executable per bucket, as requested with --specialise; this target measured no gain from it"
            return Fixed(dims, why)
        why = "one executable for all buckets, run at the exact shape: this target measured no gain from static shapes"
        return Fixed((), why)

    def shapes(self, buckets: Sequence[Bucket], options: CompileOptions) -> list[Shape]:
        return super().shapes([_runs_as(bucket) for bucket in buckets], options)

    def toolchain(self) -> dict[str, str]:
        return {package: version_of(package) for package in ("onnxruntime", "onnx")}

    def isa(self) -> tuple[str, ...]:
        return cpu_features()

    def held_cache(self, cache: CacheShape, limits: Limits, options: CompileOptions) -> CacheShape:
        """llmc's kernel reads ring buffers of whole key blocks, which hold a window and a step's new tokens. ONNX
        Runtime's kernel reads contiguous tokens, which its executor moves down.
        """
        if kept_in(options) == INT8 and not cache.kv:
            raise InputError(
                f"{KV_CACHE_DTYPE.flag} {INT8}: the model has recurrent states and no keys or values; leave it out"
            )
        if not ours(options):
            return cache.in_rings(PROMPT_CHUNK, limits.max_model_len - ROLLING_ROOM)
        from llmc.compiler.targets.onnxruntime.costs import prompt_chunk

        step = min(limits.max_num_batched_tokens, prompt_chunk(options), limits.max_model_len)
        return cache.in_rings(step, limits.max_model_len, KEYS)

    def trace(self, stages: Stages, options: CompileOptions) -> Sequence[Program]:
        return [traced_graph(stages)]

    def lower(self, stages: Stages, programs: Sequence[Program], options: CompileOptions) -> Lowered:
        own, (stages, mixed) = ours(options), calibrated(stages, options, ADDED_KL)
        held = cache_for(self, stages, options)
        built = self._lower(stages, programs, self._formats(stages, options, mixed, bool(held.rewind.rings)))
        weights = weights_stage(stages, built.outputs["recipes"], built.outputs["tables"])
        if not own and (options.specialise or options.quantize != "none"):
            weights = self._pack(stages, built, weights)
        file = weights.outputs["weights"]
        kernels = libraries(stages, sets_of(options, self.isa())) if own else {}
        stand_in = verified_by(options, self.isa()) if own and options.verify != "none" else None
        model = stages.path(built.outputs["model"])
        rings = {t.entry: t.ring for t in held.kv if t.ring is not None}
        return OnnxLowered(
            files={"weights": file.digest, **kernels},
            components={
                "lowered": built.outputs["model"].digest,
                "weights": file.digest,
                "placements": weights.outputs["placements"].digest,
                **({"rings": json.dumps(rings)} if options.specialise and rings else {}),
                **kernels,
            },
            inputs={
                "model": model,
                "placements": stages.path(weights.outputs["placements"]),
                "recipes": stages.path(built.outputs["recipes"]),
            },
            forms={"model": model},
            rings=rings,
            facts=mixed.facts,
            stand_ins=libraries(stages, [stand_in]) if stand_in is not None else {},
        )

    def analyse(
        self, stages: Stages, lowered: Lowered, files: Sequence[Path], options: CompileOptions
    ) -> dict[str, Any]:
        from llmc.compiler.weights.kept import kept_in

        return {**kept_in(lowered.inputs["recipes"].read_bytes(), stages.checkpoint), **lowered.facts}

    def describe(self, analysis: Mapping[str, Any]) -> list[str]:
        from llmc.compiler.weights.kept import kept_lines

        return [*kept_lines(analysis), *mixed_lines(analysis)]

    def show(self, lowered: Lowered, shapes: Sequence[Shape], options: CompileOptions) -> Iterator[tuple[str, str]]:
        import onnx

        for name, path in lowered.forms.items():
            yield name, onnx.printer.to_text(onnx.load_from_string(path.read_bytes()))

    def _formats(self, stages: Stages, options: CompileOptions, mixed: Mixed, rings: bool) -> OnnxOptions:
        from llmc.compiler.targets.onnxruntime.formats import OnnxOptions

        own, quantize, activations = ours(options), str(options.quantize), ACTIVATIONS.of(options) is None
        found = OnnxOptions(
            INT8_BLOCK if quantize == "int8" else 0, lm_head_bits=mixed.lm_head_bits, activations=activations,
            panels=own, rolls=rings and not own, cache=kept_in(options) or F16, prompts=prompts_in(options),
        )  # fmt: skip
        if quantize in ("int4", "keep"):
            from llmc.compiler.weights.kept import require_quantized

            if quantize == "keep":
                require_quantized(stages.checkpoint)
            stored = {
                name: form for name, form in stored_forms(stages.checkpoint).items()
                if keeps(quantize, form, name in EMBED_LM_HEAD) and name not in mixed.wide
            }  # fmt: skip
            bits, fold = 4 if quantize == "int4" else 8, activations and not own and self._folds(stages)
            found = replace(found, block=BLOCK, bits=bits, stored=stored, wide=mixed.wide, fold=fold)
        group = GROUP_SIZE.of(options)
        return found if group is None else replace(found, block=group, normed=group)

    def _folds(self, stages: Stages) -> bool:
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
            built = to_onnx(fused, options)
            files = {
                "model": built.model.SerializeToString(deterministic=True),
                "folded": json.dumps(built.folded, sort_keys=True).encode(),
                **written(built.recipes, built.tables),
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

    def compile(self, lowered: Lowered, shape: Shape, options: CompileOptions) -> CompiledExecutable:
        """Fix the shape, refer to the weights, and open the result once to prove that the runtime accepts it."""
        from llmc.artifacts.digest import parse
        from llmc.compiler.targets.onnxruntime.onnx_model import (
            add_top,
            bind,
            load_model,
            offset_symbols,
            set_placements,
        )
        from llmc.runtime.executors.onnxruntime.session import open_session

        assert isinstance(lowered, OnnxLowered)
        model = load_model(lowered.inputs["model"].read_bytes())
        sizes = {"B": shape.batch, "Q": shape.query, "R": shape.batch}
        if shape.context is not None and shape.query is not None:
            tokens = shape.context + shape.query
            for entry, symbol in offset_symbols(model).items():
                ring = lowered.rings.get(entry)
                sizes[symbol] = tokens if ring is None else min(tokens, rolling_ring(ring, shape.query))
        bound = bind(add_top(model, options.sample_top_k), {k: v for k, v in sizes.items() if v is not None})
        placements = json.loads(lowered.inputs["placements"].read_bytes())
        data: bytes = set_placements(bound, parse(lowered.files["weights"]), placements).SerializeToString(
            deterministic=True
        )
        here = best_set(self.isa(), [s.name for s in sets_in(lowered.files)]) if ours(options) else None
        if here is not None or not ours(options):
            library = None if here is None else str(lowered.folder / parse(lowered.files[here.file]))
            weights = str(lowered.folder)
            try:
                open_session(data, library=library, session__model_external_initializers_file_folder_path=weights)
            except Exception as e:
                raise CompileError(f"ONNX Runtime refuses the executable for {shape}: {e}") from e
        return CompiledExecutable(data, "native")


def _runs_as(bucket: Bucket) -> Bucket:
    """A prefill chunk over a past runs row by row, because the attention kernel takes one row there."""
    return replace(bucket, batch=1) if bucket.phase == "prompt" and bucket.context else bucket
