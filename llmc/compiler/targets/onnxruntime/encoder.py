"""Encoders on ONNX Runtime's CPU provider: the traced program in ONNX operators, with its weights in a separate file.

`--specialise` builds a model a bucket (texts × tokens) over the same weights. int8: the runtime quantizes activations
in the same blocks as weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from llmc.compiler.code import code_digest
from llmc.compiler.stages import toolchain, version_of
from llmc.compiler.targets.encoder import CompiledEncoder, EncoderCase, EncoderTarget

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.workspace import Workspace
    from llmc.buckets.encoding import EncodePlan
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.stages import Stages

_BLOCK = 64
"""Inputs of a matmul that share a scale with 8-bit weights, as in the target for decoders."""


class OnnxRuntimeEncoderTarget(EncoderTarget):
    """Compiles encoders for ONNX Runtime."""

    name: ClassVar[str] = "onnxruntime"
    encoder: ClassVar[str] = "onnxruntime-encoder"
    quantisations: ClassVar[tuple[str, ...]] = ("none", "int8")
    packages: ClassVar[tuple[str, ...]] = ("onnxruntime", "onnx")

    def specialised(self, options: CompileOptions) -> bool:
        return bool(options.specialise)

    def toolchain(self) -> dict[str, str]:
        return {package: version_of(package) for package in ("onnxruntime", "onnx")}

    def lowered(
        self, stages: Stages, plan: EncodePlan, case: EncoderCase, options: CompileOptions
    ) -> Iterator[tuple[str, str]]:  # fmt: skip
        import onnx

        model = stages.path(self._lower(stages, case, options).outputs["model"]).read_bytes()
        yield "model", onnx.printer.to_text(onnx.load_from_string(model))

    def make(self, stages: Stages, plan: EncodePlan, case: EncoderCase, options: CompileOptions) -> CompiledEncoder:
        lowered = self._lower(stages, case, options)
        shapes: list[tuple[int, int] | None] = [None]
        if options.specialise:
            shapes = [(bucket.batch, bucket.query) for bucket in plan.buckets]
        return CompiledEncoder(
            [(shape, self._executable(stages, lowered, shape)) for shape in shapes],
            {"weights": lowered.outputs["weights"].digest}, {"type_ids": bool(lowered.meta["type_ids"])},
        )  # fmt: skip

    def _lower(self, stages: Stages, case: EncoderCase, options: CompileOptions) -> Entry:
        components = {
            **case.components(stages),
            "quantize": options.quantize,
            "target": self.name,
            **toolchain("torch", "transformers", "onnx", "numpy", "sympy", python=True),
            "code": code_digest(self._lower),
        }

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            from llmc.compiler.frontend.encode import Encode, trace_encoder
            from llmc.compiler.program.fuse import fuse
            from llmc.compiler.program.import_fx import import_encoder
            from llmc.compiler.targets.onnxruntime.formats import OnnxOptions
            from llmc.compiler.targets.onnxruntime.to_onnx import to_onnx
            from llmc.compiler.weights.recipes import ModuleTensors, write_weights

            model = Encode(stages.checkpoint, case.task, case.judges)
            graph = fuse(import_encoder(trace_encoder(model)))
            built = to_onnx(graph, OnnxOptions(_BLOCK if options.quantize == "int8" else 0))
            with workspace.writer() as out:
                placed = write_weights(built.recipes, ModuleTensors(model), built.tables, out)
            assert out.blob is not None  # the blob is set once the block has ended without an error
            placements = {name: {"offset": at.offset, "length": at.length} for name, at in placed.items()}
            workspace.meta["type_ids"] = model.typed
            return {
                "model": workspace.put_bytes(built.model.SerializeToString(deterministic=True)),
                "placements": workspace.put_bytes(json.dumps(placements, sort_keys=True).encode()),
                "weights": out.blob,
            }

        return stages.run("encoder", components, build)

    def _executable(self, stages: Stages, lowered: Entry, shape: tuple[int, int] | None) -> Entry:
        weights = lowered.outputs["weights"]
        components = {
            "model": lowered.outputs["model"].digest,
            "placements": lowered.outputs["placements"].digest,
            "weights": weights.digest,
            "batch": shape and shape[0],
            "query": shape and shape[1],
            **toolchain(*self.toolchain()),
            "code": code_digest(self._executable),
            "state": "portable",
        }

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            from llmc.artifacts.digest import parse
            from llmc.compiler.targets.onnxruntime.onnx_model import bind, load_model, set_placements

            model = load_model(stages.path(lowered.outputs["model"]).read_bytes())
            bound = bind(model, dict(zip("BQ", shape, strict=True)) if shape else {})
            placements = json.loads(stages.path(lowered.outputs["placements"]).read_bytes())
            data: bytes = set_placements(bound, parse(weights.digest), placements).SerializeToString(deterministic=True)
            return {"executable": workspace.put_bytes(data)}

        return stages.run("executable", components, build)
