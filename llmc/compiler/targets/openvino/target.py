"""OpenVINO: on CPU one paged-attention model for all buckets, compiled ahead of time for the CPU plugin (finish.py).

One executable runs every step without padding. `--specialise` adds executables for a fixed number of decode rows, which
are faster and hold their own packed copy of the weights: as many as the memory budget allows, hottest first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmc.compiler.architectures.shared.block_form import forms_in_key
from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.checkpoint.base import FLOATS8, coded_names, stored_forms
from llmc.compiler.options import CompileOptions, UnfitError
from llmc.compiler.program.program import GraphProgram, Program
from llmc.compiler.stages import Stages
from llmc.compiler.targets.base import (
    ANY_PHASE,
    CompiledExecutable,
    Fixed,
    Lowered,
    Recorded,
    Resolved,
    Shape,
    cache_for,
)
from llmc.compiler.targets.calibration import (
    CALIBRATE,
    LM_HEAD_BITS,
    MAX_KL,
    Mixed,
    calibrated,
    mixed_lines,
    require_calibratable,
)
from llmc.compiler.targets.description import Hardware
from llmc.compiler.targets.openvino.base_target import (
    ACTIVATION_GROUP_SIZE,
    GROUP_SIZE,
    KV_CACHE_DTYPE,
    OPENVINO,
    SPECIALISE_MEMORY,
    STARTER,
    OpenVinoBase,
    budget,
)
from llmc.compiler.targets.openvino.precision import (  # fmt: skip
    ACTIVATIONS,
    FEW_ROWS,
    MIXED,
    computes_in,
    groups_of,
    properties,
    require_precision,
)
from llmc.errors import InputError
from llmc.runtime.accelerators import CPU
from llmc.runtime.host import cpu_features
from llmc.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from llmc.artifacts.store.entries import Entry
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.limits import Limits
    from llmc.compiler.targets.base import Deployment, Target
    from llmc.compiler.targets.costs import Costs
    from llmc.compiler.targets.openvino.finish import FinishedWeights
    from llmc.compiler.targets.openvino.formats import Constants
    from llmc.runtime.cache_shape import CacheShape
    from llmc.runtime.executors.openvino.device import MappedWeights

KINDS = ("CPU", "GPU", "NPU")
NPU_PLATFORMS = ("3720", "4000", "5010", "5020", "6010")
"""Meteor and Arrow Lake, Lunar Lake, Panther Lake, Wildcat Lake and its successor, by OpenVINO's names
(src/plugins/intel_npu/README.md of 08d1b43; openvino#37370).
"""

STARTER_DEVICE = "onnxruntime"
PLAIN = "plain"
"""Name of a lowering result and analysis member: the parts that run in plain operators (PagedModel.plain)."""
ADDED_KL = 0.001
"""KL divergence that 8-bit embedding and lm_head and a u8 KV cache add to int4's (docs/quantising.md)."""


class OpenVinoTarget(OpenVinoBase):
    """`--device openvino`."""

    description = replace(
        OPENVINO,
        quantisations=("none", "int8", "int4", "keep"),
        dtypes=("f32", "bf16"),
        options=(*OPENVINO.options, CALIBRATE, MAX_KL, LM_HEAD_BITS),
        listed=("", "GPU", "NPU"),
        selects_adapters=True,
        accelerators=(CPU,),
        hardware=Hardware(
            "x86-64 with AMX (Intel Xeon), with AVX-512 and with AVX2 (AMD EPYC)",
            "OpenVINO 2026.4.1",
            "2026-11",
            "benchmarks/RESULTS.md",
        ),
    )

    @classmethod
    def of(cls, detail: str, settings: Settings) -> Target:
        """CPU, GPU (GPU.1) or NPU (NPU.4000) behind the name; VLLM_OPENVINO_DEVICE, or CPU, for the name alone.

        GPU and NPU get models of one shape each (openvino/static_target.py).
        """
        kind = (detail or settings.openvino_device or "CPU").upper()
        name, _, behind = kind.partition(".")
        if name not in KINDS:
            raise InputError(f"--device openvino:{detail or kind}: OpenVINO compiles here for {', '.join(KINDS)}")
        if behind and not (behind.isdecimal() if name == "GPU" else name == "NPU" and behind in NPU_PLATFORMS):
            known = "openvino:GPU.1 and so on, openvino:" + ", openvino:".join(f"NPU.{p}" for p in NPU_PLATFORMS)
            raise InputError(f"--device openvino:{detail or kind}: {name} has no {behind!r}; known: {known}")
        if kind != "CPU":
            from llmc.compiler.targets.openvino.static_target import OpenVinoStaticTarget

            return OpenVinoStaticTarget(kind)
        return cls()

    @property
    def costs(self) -> Costs:
        from llmc.compiler.targets.openvino.costs import OpenVinoCpuCosts

        return OpenVinoCpuCosts(self.default_group)

    def configure(self, options: CompileOptions) -> CompileOptions:
        """VLLM_OPENVINO_* replace missing flags."""
        settings = self.settings
        if options.quantize is None and settings.openvino_quantized is not None:
            options = replace(options, quantize="int8" if settings.openvino_quantized else "none")
        if options.dtype == "auto":
            options = replace(options, dtype=default_dtype(options.quantize or self.description.default_quantize))
        options = super().configure(options)
        require_precision(options.dtype, cpu_features())
        quantize = str(options.quantize)
        require_calibratable(options)
        for option in (CALIBRATE, MAX_KL):
            if quantize == "int4" and option.of(options) is not None and GROUP_SIZE.of(options) is not None:
                raise InputError(f"{option.flag} has a scale for each 32 inputs; leave out {GROUP_SIZE.flag}")
        requested = KV_CACHE_DTYPE.of(options) or settings.openvino_kv_precision
        chosen = properties(quantize, options.dtype, requested)
        activations = ACTIVATION_GROUP_SIZE.of(options)
        _, used = groups_of(quantize, GROUP_SIZE.of(options), activations)
        if quantize != MIXED and used == ACTIVATIONS[quantize]:
            activations = None
        return options.changed(kv_cache_dtype=chosen["KV_CACHE_PRECISION"], activation_group_size=activations)

    def default_group(self, quantize: str) -> int | None:
        """None for the quantization whose default groups depend on the shape."""
        return None if quantize == MIXED else super().default_group(quantize)

    def fixes(self, options: CompileOptions) -> Fixed:
        """None: the executable for every shape is always there, and each fixed size is another copy of the weights."""
        if options.specialise:
            why = "one executable for all buckets, and as many of fixed decode batches as the memory budget allows"
            return Fixed((), why)
        return Fixed((), "one executable for all buckets, its rows packed without padding")

    def held_cache(self, cache: CacheShape, limits: Limits, options: CompileOptions) -> CacheShape:
        """Windows have blocks of their own, one more than the window's."""
        from llmc.runtime.executors.openvino.blocks import BLOCK

        return cache.in_blocks(BLOCK, limits.max_model_len)

    def shapes(self, buckets: Sequence[Bucket], options: CompileOptions) -> list[Shape]:
        fixed = [Shape("decode", n, 1, None, count) for n, count in self._fixed(buckets, options).items()]
        return [Shape(ANY_PHASE, None, None, None, len(buckets)), *fixed]

    def _fixed(self, buckets: Sequence[Bucket], options: CompileOptions) -> dict[int, int]:
        """Decode batches with their own executable, each with the number of buckets that it serves."""
        if not options.specialise:
            return {}
        batches = sorted({b.batch for b in buckets if b.phase == "decode"}, reverse=True)
        return {n: sum(b.phase == "decode" and b.batch == n for b in buckets) for n in batches}

    def lower(self, stages: Stages, programs: Sequence[Program], options: CompileOptions) -> Lowered:
        stages, mixed = calibrated(stages, options, ADDED_KL)
        models = {_name(rows): rows for rows in (None, *self._fixed(stages.plan.buckets, options))}
        built = self._lower(stages, programs, options, models, mixed)
        plain = json.loads(stages.store.get_bytes(built.outputs[PLAIN].digest))
        self._require_fitting(stages, options, plain.get("attention", [0, ""])[1])
        finished = self._finish(stages, options, models, built).outputs
        beside = {name: built.outputs[name] for name in (PLAIN, "recipes")}
        lowered = self.lowered(stages, models, finished, finished["weights"], built.outputs, beside)
        return replace(lowered, facts=mixed.facts)

    def _require_fitting(self, stages: Stages, options: CompileOptions, unpaged: str) -> None:
        """Raise UnfitError for precisions that recurrent states, or attention in plain operators (`unpaged`), lack."""
        instead = {}
        if unpaged and KV_CACHE_DTYPE.of(options) != "f32":
            instead["kv_cache_dtype"] = "f32"
        if options.dtype != "f32" and (unpaged or cache_of(stages.checkpoint.config).states):
            instead["dtype"] = "f32"
        if instead:
            raise UnfitError(
                f"{unpaged} in OpenVINO, whose plain operators compute in float32 and read a KV cache in f32"
                if unpaged
                else f"layers with recurrent state are computed in float32: OpenVINO in {options.dtype} was not "
                "seen to keep their numbers",
                "use " + " ".join(f"--{name.replace('_', '-')} f32" for name in instead),
                **instead,
            )

    def analyse(
        self, stages: Stages, lowered: Lowered, files: Sequence[Path], options: CompileOptions
    ) -> dict[str, Any]:
        """Unfused operators with reasons, the share of the checkpoint's own blocks, and matrices in 8 bits."""
        from llmc.compiler.weights.kept import kept_in

        plain = json.loads(lowered.inputs[PLAIN].read_bytes())
        kept = kept_in(lowered.inputs["recipes"].read_bytes(), stages.checkpoint)
        return {**({PLAIN: plain} if plain else {}), **kept, **lowered.facts}

    def describe(self, analysis: Mapping[str, Any]) -> list[str]:
        from llmc.compiler.weights.kept import kept_lines

        plain = [
            f"{what} of {layers} layers by OpenVINO's plain operators: {why}; rows of one length run together"
            for what, (layers, why) in analysis.get(PLAIN, {}).items()
        ]
        return [*plain, *kept_lines(analysis), *mixed_lines(analysis)]

    def _lower(
        self, stages: Stages, programs: Sequence[Program], options: CompileOptions, models: Mapping[str, int | None],
        mixed: Mixed,
    ) -> Entry:  # fmt: skip
        eight, lm_head = mixed.wide, mixed.lm_head_bits
        stored = stored_forms(stages.checkpoint) if options.quantize in ("int4", "keep") else {}
        stored = {name: form for name, form in stored.items() if name not in eight}
        halves: list[str] = []
        if options.quantize == "keep":
            from llmc.compiler.weights.kept import require_quantized

            require_quantized(stages.checkpoint)
            halves = [name for name in coded_names(stages.checkpoint) if stages.checkpoint.unkept(name) == FLOATS8]
        from llmc.runtime.executors.openvino.blocks import held_widths

        shape = cache_for(self, stages, options)
        kept, held, rings = shape.kv, KV_CACHE_DTYPE.of(options) or "f32", [t.ring for t in shape.kv[::2]]
        wide = held_widths(held, kept) != held_widths("f32", kept)
        form = {
            "form": "paged", "stored": forms_in_key(stored),
            "fixed": " ".join(str(rows) for rows in models.values() if rows is not None),
            **({"halves": " ".join(halves)} if halves else {}),
            **({"wide": True} if wide else {}), **({"rings": json.dumps(rings)} if any(rings) else {}),
            **({"eight": " ".join(sorted(eight))} if eight else {}), **({"lm_head": lm_head} if lm_head == 4 else {}),
        }  # fmt: skip

        def lower(program: GraphProgram, constants: Constants) -> Iterator[tuple[str, Any]]:
            from llmc.compiler.program.fuse import fuse
            from llmc.compiler.targets.openvino.formats import format_for
            from llmc.compiler.targets.openvino.paged import PagedModel

            graph = fuse(program.graph(), adapted=True)
            for name, rows in models.items():
                group, _ = self._groups(options, rows)
                weights = format_for(str(options.quantize), options.dtype, group, stored, halves, eight, lm_head)
                top_k = options.sample_top_k
                paged = PagedModel(graph, weights(constants), rows=rows, top_k=top_k, wide=wide, rings=rings)
                yield name, paged.model
            yield PLAIN, json.dumps(paged.plain)

        return self.lower_stage(stages, programs, options, form, self._lower, lower)

    def _finish(
        self, stages: Stages, options: CompileOptions, models: Mapping[str, int | None], lowered: Entry
    ) -> Entry:  # fmt: skip
        settings, shape = self.plugin_settings(options), cache_of(stages.checkpoint.config)

        def finish_one(name: str, xml: bytes, given: MappedWeights, weights: FinishedWeights) -> bytes:
            from llmc.compiler.targets.openvino.finish import finish
            from llmc.runtime.executors.openvino.device import WHOLE_SHAPES, properties_for, read_paged

            model = read_paged(xml, given, shape, name)
            rows = models[name]  # in a model of fixed sizes, snippets with constants would not be read again
            whole = {} if rows is None else WHOLE_SHAPES
            return finish(model, properties_for(settings, rows) | whole, weights).encode()

        return self.finish_stage(stages, options, models, lowered, self._finish, finish_one)

    def plugin_settings(self, options: CompileOptions) -> dict[str, Any]:
        """ "properties" for the model for every shape; "fixed_properties" for fixed sizes: pairs of the most decode
        rows, ascending and None for any number, and their settings.
        """
        found: dict[str, Any] = {"properties": self._properties(options, None)}
        if options.specialise:
            few, more = (self._properties(options, rows) for rows in (FEW_ROWS, FEW_ROWS + 1))
            found["fixed_properties"] = [[FEW_ROWS, few], [None, more]]
        return found

    def _properties(self, options: CompileOptions, rows: int | None) -> dict[str, str]:
        _, activations = self._groups(options, rows)
        return properties(str(options.quantize), options.dtype, KV_CACHE_DTYPE.of(options), activations)

    def _groups(self, options: CompileOptions, rows: int | None) -> tuple[int, int]:
        return groups_of(str(options.quantize), GROUP_SIZE.of(options), ACTIVATION_GROUP_SIZE.of(options), rows)

    def resolve(self, options: CompileOptions, deployment: Deployment) -> Resolved:
        """With --starter, adds the same model for ONNX Runtime, which opens in a tenth of a second."""
        found = super().resolve(options, deployment)
        if not STARTER.of(found.options):
            return found
        from llmc.compiler.targets import open_target

        target, chosen = open_target(STARTER_DEVICE, self.settings), found.options
        quantize = chosen.quantize if chosen.quantize in target.description.quantisations else None
        same = CompileOptions(
            STARTER_DEVICE, quantize, verify=chosen.verify, jobs=chosen.jobs, sample_top_k=chosen.sample_top_k
        )
        return replace(found, starter=(target, target.configure(same)))

    def recorded(self, options: CompileOptions) -> Recorded:
        found = self.plugin_settings(options)
        if options.specialise:
            found[SPECIALISE_MEMORY.name] = budget(options)
        return replace(super().recorded(options), options=found)

    def compile(self, lowered: Lowered, shape: Shape, options: CompileOptions) -> CompiledExecutable:
        return CompiledExecutable(lowered.inputs[_name(shape.batch)].read_bytes(), "native")


def default_dtype(quantize: str) -> str:
    """Return bf16 for int8 where the CPU computes in it: prefill takes 20% less time, at the same KL divergence."""
    return "bf16" if quantize == "int8" and computes_in("bf16", cpu_features()) else "f32"


def _name(rows: int | None) -> str:
    """Name of the model of `rows` decode rows, or of the one for every shape (None)."""
    return "model" if rows is None else f"model_{rows}"
