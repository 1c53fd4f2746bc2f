"""Encoders on OpenVINO's CPU plugin: the traced program with its weights, converted once, for every shape.

OpenVINO fuses attention over padded batches; a mask marks padding. The model (IR) and its weights file are portable:
the plugin compiles it at open, in 0.2 s for 33 million parameters. int8: matmul weights in 8 bits with a scale a row;
the plugin quantizes activations in groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llmc.compiler.code import code_digest
from llmc.compiler.stages import toolchain, version_of
from llmc.compiler.targets.encoder import CompiledEncoder, EncoderCase, EncoderTarget
from llmc.compiler.targets.openvino.precision import computes_in, require_precision
from llmc.runtime.host import cpu_features

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.workspace import Workspace
    from llmc.buckets.encoding import EncodePlan
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.stages import Stages

_ACTIVATIONS = "32"
"""Inputs that share a scale in a matmul with 8-bit weights: the plugin's own default."""


class OpenVinoEncoderTarget(EncoderTarget):
    """Compiles encoders for OpenVINO's CPU plugin."""

    name: ClassVar[str] = "openvino"
    encoder: ClassVar[str] = "openvino-encoder"
    quantisations: ClassVar[tuple[str, ...]] = ("none", "int8")
    dtypes: ClassVar[tuple[str, ...]] = ("f32", "bf16")
    packages: ClassVar[tuple[str, ...]] = ("openvino",)

    @classmethod
    def of(cls, detail: str) -> Self:
        return super().of("" if detail.upper() == "CPU" else detail)

    def default_dtype(self) -> str:
        """bf16 on a CPU that computes in it, as OpenVINO's default."""
        return "bf16" if computes_in("bf16", cpu_features()) else "f32"

    def configure(self, options: CompileOptions) -> CompileOptions:
        built = super().configure(options)
        require_precision(built.dtype, cpu_features())
        return built

    def toolchain(self) -> dict[str, str]:
        return {"openvino": version_of("openvino", "openvino")}

    def lowered(
        self, stages: Stages, plan: EncodePlan, case: EncoderCase, options: CompileOptions
    ) -> Iterator[tuple[str, str]]:  # fmt: skip
        yield "model", stages.path(self._convert(stages, case, options).outputs["executable"]).read_text()

    def make(self, stages: Stages, plan: EncodePlan, case: EncoderCase, options: CompileOptions) -> CompiledEncoder:
        entry = self._convert(stages, case, options)
        exact = options.quantize == "none"
        properties = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0" if exact else _ACTIVATIONS}
        return CompiledEncoder(
            [(None, entry)], {"weights": entry.outputs["weights"].digest},
            {"type_ids": bool(entry.meta["type_ids"]), "properties": properties},
        )  # fmt: skip

    def _convert(self, stages: Stages, case: EncoderCase, options: CompileOptions) -> Entry:
        components = {
            **case.components(stages),
            "quantize": options.quantize,
            "target": self.name,
            **toolchain("torch", "transformers", "openvino", "numpy", python=True),
            "code": code_digest(self._convert),
            "state": "portable",
        }

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            import openvino as ov

            from llmc.compiler.frontend.encode import Encode, trace_encoder

            model = Encode(stages.checkpoint, case.task, case.judges)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # OpenVINO reads torch's trees by a class that torch means to rename
                converted = ov.convert_model(trace_encoder(model))
            for given, name in zip(converted.inputs, model.inputs, strict=True):
                given.get_tensor().set_names({name})
            if options.quantize == "int8":
                compress(converted)
            location = workspace.folder / "encoder.xml"
            ov.save_model(converted, location, compress_to_fp16=False)
            weights = location.with_suffix(".bin")
            workspace.meta["type_ids"] = model.typed
            return {"executable": workspace.put_file(location), "weights": workspace.put_file(weights)}

        return stages.run("encoder", components, build)


def compress(model: Any) -> None:
    """Convert the weights of every matmul to symmetric int8, with a scale for each output row."""
    import numpy as np
    from openvino import opset13 as ops

    from llmc.compiler.weights.recipes import quantized, scales

    built: dict[str, Any] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        source = node.input_value(1).get_node()
        if source.get_type_name() != "Constant" or len(source.shape) != 2 or not node.get_attributes()["transpose_b"]:
            continue
        name = source.get_friendly_name()
        if name not in built:
            weight = np.array(source.data, np.float32)
            scale = scales(weight, "int8")
            held = ops.convert(ops.constant(quantized(weight, scale, "int8")), "f32")
            built[name] = ops.multiply(held, ops.constant(scale[:, None]))
        node.input(1).replace_source_output(built[name].output(0))
