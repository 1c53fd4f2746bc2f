"""OpenVINO: on CPU one paged-attention model for all buckets, finished for the CPU plugin when it is compiled.

What all executables share is made in four cached stages: the lowered models (XML without weights), the weights that
their recipes name, and the finished models with the weights file that they share (compiler/openvino/finish.py). One
executable runs every step, padded to nothing. `--specialise` adds executables of a fixed number of decode rows, which
are faster and hold their own packed copy of the weights in memory: as many as the budget allows, hottest first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.compiler.checkpoint.base import stored_types
from llmc.compiler.options import CompileOptions
from llmc.compiler.stages import Stages, code_digest, toolchain, version_of
from llmc.compiler.targets.base import ANY_PHASE, Compiled, Prepared, Shape, Target
from llmc.errors import InputError
from llmc.runtime.host import cpu_features
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.blobs import Blob
    from llmc.artifacts.entries import Entry
    from llmc.artifacts.workspace import Workspace
    from llmc.buckets.bucket import Bucket
    from llmc.compiler.model_size import ModelSize

KINDS = ("CPU", "GPU", "NPU")
DEFAULT_BUDGET = 512 << 20
"""Bytes that executables of fixed sizes may hold beside the one for every shape, unless --specialise-memory says."""

STARTER_DEVICE = "onnxruntime"
CACHE_BYTES = {"u8": 1, "bf16": 2, "f32": 4}

_OPENVINO_CODE = tuple(f"llmc.compiler.openvino.{m}" for m in ("constants", "formats", "paged"))
_LOWERING_CODE = (
    "llmc.compiler.frontend", "llmc.compiler.lowering.import_fx", "llmc.compiler.lowering.fuse",
    "llmc.compiler.lowering.ir", "llmc.compiler.checkpoint.base", *_OPENVINO_CODE, __name__,
)  # fmt: skip
_FAMILIES = ("llmc.compiler.openvino.compression", "llmc.compiler.lowering.nbits")
_FINISH_CODE = ("llmc.compiler.openvino.finish", "llmc.compiler.openvino.constants", __name__)


class OpenVinoTarget(Target):
    """See the module's docstring."""

    name: ClassVar[str] = "openvino"
    executor: ClassVar[str] = "openvino"
    quantisations: ClassVar[tuple[str, ...]] = ("none", "int8", "int4", "keep")
    dtypes: ClassVar[tuple[str, ...]] = ("f32", "bf16")
    default_quantize: ClassVar[str] = "int8"
    compile_needs: ClassVar[tuple[str, ...]] = ("torch", "transformers", "safetensors", "gguf", "openvino")
    run_needs: ClassVar[tuple[str, ...]] = ("openvino",)
    install: ClassVar[str] = "pip install 'llmc[compile,openvino]'"
    takes_openvino_options: ClassVar[bool] = True
    graph_bytes_source: ClassVar[str] = "the packed copy of the weights, and the largest layer's activations of a step"

    @classmethod
    def of(cls, detail: str) -> Target:
        """CPU, GPU or NPU behind the name; VLLM_OPENVINO_DEVICE, or CPU, for the name alone.

        GPU and NPU get models of one shape each (openvino/static_target.py).
        """
        kind = (detail or Settings.from_environment().openvino_device or "CPU").upper()
        if kind.split(".")[0] not in KINDS:
            raise InputError(f"--device openvino:{detail or kind}: OpenVINO compiles here for {', '.join(KINDS)}")
        if kind != "CPU":
            from llmc.compiler.openvino.static_target import OpenVinoStaticTarget

            return OpenVinoStaticTarget(kind)
        return cls()

    def configure(self, options: CompileOptions) -> CompileOptions:
        """VLLM_OPENVINO_* count where a flag is not given."""
        settings = Settings.from_environment()
        if options.quantize is None and settings.openvino_quantized is not None:
            options = replace(options, quantize="int8" if settings.openvino_quantized else "none")
        options = super().configure(options)
        _formats().require_precision(options.dtype, cpu_features())
        asked = options.kv_cache_dtype or settings.openvino_kv_precision
        chosen = _formats().properties(str(options.quantize), options.dtype, asked)
        return replace(options, kv_cache_dtype=chosen["KV_CACHE_PRECISION"])

    @property
    def specialises_by_default(self) -> bool:
        """No: every fixed size holds the weights once more."""
        return False

    def static_dims(self, options: CompileOptions) -> tuple[str, ...]:
        """None: the executable for every shape is always there."""
        return ()

    def choice(self, options: CompileOptions) -> str:
        """What was compiled."""
        if options.specialise:
            return "one executable for all buckets, and as many of fixed decode batches as the memory budget allows"
        return "one executable for all buckets, its rows laid end to end: nothing is padded"

    def toolchain(self) -> dict[str, str]:
        """OpenVINO decides operators, layouts and kernels."""
        return {"openvino": version_of("openvino", "openvino")}

    def isa(self) -> tuple[str, ...]:
        """Finished models and verified numbers hold for this instruction set."""
        return cpu_features()

    def cache_bytes(self, options: CompileOptions) -> int:
        """Of the precision that was asked for; the parameters of u8 blocks are an eighth more."""
        return CACHE_BYTES[self.configure(options).kv_cache_dtype or "f32"]

    def graph_bytes(self, model: ModelSize, tokens: int) -> int:
        """The packed copy of the weights, which OpenVINO keeps beside the file, and the activations of a step."""
        return model.parameters + super().graph_bytes(model, tokens)

    def shapes(self, buckets: Sequence[Bucket], options: CompileOptions) -> list[Shape]:
        """The shape of everything, and the decode batches that are fixed."""
        fixed = [Shape("decode", n, 1, None, count) for n, count in self._fixed(buckets, options).items()]
        return [Shape(ANY_PHASE, None, None, None, len(buckets)), *fixed]

    def _fixed(self, buckets: Sequence[Bucket], options: CompileOptions) -> dict[int, int]:
        """Decode batches that get an executable, each with how many buckets it serves."""
        if not options.specialise:
            return {}
        batches = sorted({b.batch for b in buckets if b.phase == "decode"}, reverse=True)
        return {n: sum(b.phase == "decode" and b.batch == n for b in buckets) for n in batches}

    def prepare(self, stages: Stages, options: CompileOptions) -> Prepared:
        """Trace and lower once, make the weights, and finish every model over one weights file."""
        fixed = tuple(self._fixed(stages.plan.buckets, options))
        lowered = self._lower(stages, options, fixed)
        weights = self._weights(stages, lowered)
        finished = self._finish(stages, lowered, weights, options, fixed)
        file = finished.outputs["weights"]
        models = {name: finished.outputs[name] for name in _model_names(fixed)}
        return Prepared(
            files={"weights": file.digest},
            components={"weights": file.digest, **{name: blob.digest for name, blob in models.items()}},
            inputs={name: stages.path(blob) for name, blob in models.items()},
            facts={"weights_bytes": file.size},
        )

    def _lower(self, stages: Stages, options: CompileOptions, fixed: tuple[int, ...]) -> Entry:
        stored = stored_types(stages.checkpoint) if options.quantize in ("int4", "keep") else {}
        components = {
            "config": stages.config_digest,
            "dialect": "fused",
            "form": "paged",
            "quantize": options.quantize,
            "dtype": options.dtype,
            "stored": json.dumps(stored, sort_keys=True),
            "fixed": " ".join(map(str, fixed)),
            "max_positions": stages.max_positions,
            "sample_top_k": options.sample_top_k,
            **toolchain("torch", "transformers", "sympy", "numpy", "openvino", python=True),
            "code": code_digest(*_LOWERING_CODE),
        }

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            import io

            import numpy as np

            from llmc.compiler.frontend.trace import trace
            from llmc.compiler.lowering.fuse import fuse
            from llmc.compiler.lowering.import_fx import import_program
            from llmc.compiler.openvino.constants import Constants, to_xml
            from llmc.compiler.openvino.paged import PagedModel

            graph = fuse(import_program(trace(stages.checkpoint.config, "fused"), stages.max_positions))
            constants = Constants()
            weights = _formats().format_for(str(options.quantize), options.dtype, stored=stored)(constants)
            made = {}
            for name, rows in zip(_model_names(fixed), (None, *fixed), strict=True):
                model = PagedModel(graph, weights, tokens=rows, rows=rows, top_k=options.sample_top_k).model
                made[name] = workspace.put_bytes(to_xml(model, workspace.folder).encode())
            tables = io.BytesIO()
            np.savez(tables, **constants.tables)  # type: ignore[arg-type]
            recipes = json.dumps([r.to_json() for r in constants.recipes], sort_keys=True)
            return {
                **made,
                "program": workspace.put_bytes(graph.text().encode()),
                "recipes": workspace.put_bytes(recipes.encode()),
                "tables": workspace.put_bytes(tables.getvalue()),
            }

        return stages.run("lower", components, build)

    def _weights(self, stages: Stages, lowered: Entry) -> Entry:
        from llmc.compiler.weight_stage import weights_stage

        return weights_stage(stages, lowered.outputs["recipes"], lowered.outputs["tables"], *_FAMILIES)

    def _finish(
        self, stages: Stages, lowered: Entry, weights: Entry, options: CompileOptions, fixed: tuple[int, ...]
    ) -> Entry:  # fmt: skip
        properties = self.properties(options)
        components = {
            **{name: lowered.outputs[name].digest for name in _model_names(fixed)},
            "weights": weights.outputs["weights"].digest,
            "placements": weights.outputs["placements"].digest,
            "properties": json.dumps(properties, sort_keys=True),
            **toolchain(*self.toolchain()),
            "isa": " ".join(self.isa()),
            "code": code_digest(*_FINISH_CODE),
        }

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            from llmc.compiler.lowering.recipes import Placement
            from llmc.compiler.openvino.constants import place
            from llmc.compiler.openvino.finish import FinishedWeights, finish
            from llmc.runtime.openvino.device import MappedWeights, read_paged

            placements = {
                name: Placement(p["offset"], p["length"])
                for name, p in json.loads(stages.store.get_bytes(weights.outputs["placements"].digest)).items()
            }
            mapped = MappedWeights(stages.path(weights.outputs["weights"]))
            heads = _heads(stages.checkpoint.config)
            made = {}
            with workspace.writer() as out:
                file = FinishedWeights(out)
                for name in _model_names(fixed):
                    xml = place(stages.store.get_bytes(lowered.outputs[name].digest).decode(), placements)
                    model = read_paged(xml.encode(), mapped, *heads, name)
                    made[name] = finish(model, properties, file)
            assert out.blob is not None
            return {"weights": out.blob, **{name: workspace.put_bytes(xml.encode()) for name, xml in made.items()}}

        return stages.run("finish", components, build)

    def properties(self, options: CompileOptions) -> dict[str, str]:
        """OpenVINO's settings that belong to the precision that was asked for."""
        found: dict[str, str] = _formats().properties(str(options.quantize), options.dtype, options.kv_cache_dtype)
        return found

    def starter(self, options: CompileOptions) -> tuple[Target, CompileOptions] | None:
        """The same model for ONNX Runtime, which opens in a tenth of a second, where --starter asks for it."""
        if not options.starter:
            return None
        from llmc.compiler.targets import open_target

        target = open_target(STARTER_DEVICE)
        quantize = options.quantize if options.quantize in target.quantisations else None
        same = CompileOptions(
            STARTER_DEVICE, quantize, options.dtype, verify=options.verify, jobs=options.jobs,
            sample_top_k=options.sample_top_k,
        )  # fmt: skip
        return target, target.configure(same)

    def manifest_options(self, options: CompileOptions) -> dict[str, Any]:
        """What the executor opens executables with."""
        found: dict[str, Any] = {"properties": self.properties(options)}
        if options.specialise:
            found["specialise_memory"] = (
                DEFAULT_BUDGET if options.specialise_memory is None else options.specialise_memory
            )
        return found

    def compile(self, prepared: Prepared, shape: Shape, options: CompileOptions) -> Compiled:
        """The finished model of that shape."""
        name = "model" if shape.batch is None else f"model_{shape.batch}"
        return Compiled(prepared.inputs[name].read_bytes(), "native")


def _model_names(fixed: Sequence[int]) -> list[str]:
    return ["model", *(f"model_{rows}" for rows in fixed)]


def _formats() -> Any:
    """formats.py, which imports openvino."""
    from importlib import import_module

    return import_module("llmc.compiler.openvino.formats")


def _heads(config: Mapping[str, Any]) -> tuple[int, int]:
    from llmc.compiler.frontend.trace import CacheShape

    shape = CacheShape.of(config)
    return shape.kv_heads, shape.head_dim
