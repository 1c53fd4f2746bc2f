"""Models of one shape for what has no paged attention: NPU and GPU, or the CPU where it is asked for.

For a device that is not here, executables are portable: each bucket's model as OpenVINO's IR, over one weights file,
verified on this CPU; nothing that OpenVINO's wheels bring compiles for NPU or GPU without the device's driver. For the
CPU they are native: compiled models without weights (blobs.py), over one weights file.

The form is the fused graph's (static.py); a model whose graph has no fused form takes the portable one (portable.py).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llmc.compiler.options import CompileOptions
from llmc.compiler.stages import Stages, code_digest, toolchain, version_of
from llmc.compiler.targets.base import Compiled, Prepared, Shape, State, StaticTarget
from llmc.errors import CompileError, InputError
from llmc.runtime.host import cpu_features

if TYPE_CHECKING:
    from llmc.artifacts.blobs import Blob
    from llmc.artifacts.entries import Entry
    from llmc.artifacts.workspace import Workspace
    from llmc.compiler.openvino.constants import Constants

_OPENVINO_CODE = tuple(
    f"llmc.compiler.openvino.{m}"
    for m in ("angles", "aten", "constants", "formats", "operations", "paged", "portable", "static")
)
_LOWERING_CODE = (
    "llmc.compiler.frontend", "llmc.compiler.lowering.import_fx", "llmc.compiler.lowering.fuse",
    "llmc.compiler.lowering.ir", "llmc.compiler.lowering.to_export", "llmc.compiler.xla.program",
    "llmc.compiler.checkpoint.base", *_OPENVINO_CODE, __name__,
)  # fmt: skip
_FAMILIES = ("llmc.compiler.openvino.compression", "llmc.compiler.lowering.nbits")
_FINISH_CODE = (
    "llmc.compiler.openvino.blobs", "llmc.compiler.openvino.finish", "llmc.compiler.openvino.constants",
    "llmc.runtime.openvino.static_blob", __name__,
)  # fmt: skip
_REMAINING = {
    "GPU": "the GPU's host compiles each model when it is first opened, with the plugin and OpenCL driver there",
    "NPU": "the NPU's host compiles each model when it is first opened, with the compiler in its driver",
}

Sizes = tuple[int, int, int]


class OpenVinoStaticTarget(StaticTarget):
    """See the module's docstring. `device` is CPU, GPU or NPU, perhaps with a number ("GPU.1")."""

    name: ClassVar[str] = "openvino"
    executor: ClassVar[str] = "openvino-static"
    why_static: ClassVar[str] = "models over contiguous caches have one shape each, since NPUs take no other"
    quantisations: ClassVar[tuple[str, ...]] = ("none", "int8")
    default_quantize: ClassVar[str] = "int8"
    compile_needs: ClassVar[tuple[str, ...]] = ("torch", "transformers", "safetensors", "gguf", "openvino")
    run_needs: ClassVar[tuple[str, ...]] = ("openvino",)
    install: ClassVar[str] = "pip install 'llmc[compile,openvino]'"
    takes_openvino_options: ClassVar[bool] = True
    compile_code = ("llmc.compiler.openvino.constants",)

    def __init__(self, device: str = "CPU") -> None:
        self.device = device

    @classmethod
    def of(cls, detail: str) -> Self:
        """The device behind the name."""
        return cls(detail.upper() or "CPU")

    def configure(self, options: CompileOptions) -> CompileOptions:
        """Caches are float32; the plugins convert them to what they compute in."""
        if options.kv_cache_dtype not in (None, "f32"):
            raise InputError(
                f"--kv-cache-dtype {options.kv_cache_dtype} is for paged attention on openvino:CPU; models of one "
                f"shape (openvino:{self.device}) take f32"
            )
        return super().configure(options)

    @property
    def state(self) -> State:
        """Native on the CPU."""
        return "native" if self.device == "CPU" else "portable"

    def choice(self, options: CompileOptions) -> str:
        """A property of the form."""
        return f"one executable per bucket: {self.why_static}"

    def remaining(self) -> str:
        """What turns a portable model into what the device runs."""
        return _REMAINING.get(self.device.split(".", maxsplit=1)[0], "")

    def toolchain(self) -> dict[str, str]:
        """OpenVINO decides operators, layouts and kernels."""
        return {"openvino": version_of("openvino", "openvino")}

    def isa(self) -> tuple[str, ...]:
        """Compiled models hold for one instruction set, portable ones for any."""
        return cpu_features() if self.state == "native" else ()

    def properties(self, options: CompileOptions) -> dict[str, str]:
        """OpenVINO's settings on the CPU; float32 throughout is exact, other weights take activations in 8 bits."""
        exact = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"} if options.quantize == "none" else {}
        return {"INFERENCE_PRECISION_HINT": "f32", **exact}

    def manifest_options(self, options: CompileOptions) -> dict[str, Any]:
        """What the executor opens executables with."""
        return {"properties": self.properties(options), "openvino_device": self.device}

    def prepare(self, stages: Stages, options: CompileOptions) -> Prepared:
        """Lower every shape, make the weights, and on the CPU compile every model over one weights file."""
        sizes = sorted({_sizes(shape) for shape in self.shapes(stages.plan.buckets, options)})
        lowered = self._lower(stages, options, sizes)
        weights = _weights(stages, lowered)
        models, file = lowered, weights.outputs["weights"]
        inputs = {"placements": stages.path(weights.outputs["placements"])}
        if self.state == "native":
            models = self._finish(stages, options, sizes, lowered, weights)
            file, inputs = models.outputs["weights"], {}
        chosen = {_name(s): models.outputs[_name(s)] for s in sizes}
        return Prepared(
            files={"weights": file.digest},
            components={"weights": file.digest, **{name: blob.digest for name, blob in chosen.items()}},
            inputs=inputs | {name: stages.path(blob) for name, blob in chosen.items()},
            facts={"weights_bytes": file.size},
        )

    def compile(self, prepared: Prepared, shape: Shape, options: CompileOptions) -> Compiled:
        """The model of that shape: as it was compiled, or its IR with the places of its weights."""
        from llmc.compiler.lowering.recipes import Placement
        from llmc.compiler.openvino.constants import place

        data = prepared.inputs[_name(_sizes(shape))].read_bytes()
        if self.state == "portable":
            placements = json.loads(prepared.inputs["placements"].read_bytes())
            places = {name: Placement(p["offset"], p["length"]) for name, p in placements.items()}
            data = place(data.decode(), places).encode()
        return Compiled(data, self.state)

    def _lower(self, stages: Stages, options: CompileOptions, sizes: Sequence[Sizes]) -> Entry:
        components = {
            "config": stages.config_digest,
            "form": "static",
            "quantize": options.quantize,
            "dtype": options.dtype,
            "shapes": " ".join(_name(s) for s in sizes),
            "max_positions": stages.max_positions,
            "sample_top_k": options.sample_top_k,
            **toolchain("torch", "transformers", "sympy", "numpy", "openvino", python=True),
            "code": code_digest(*_LOWERING_CODE),
        }

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            import numpy as np

            from llmc.compiler.openvino.constants import Constants

            try:
                constants = Constants()
                models, program = _fused(stages, options, sizes, constants, workspace)
            except CompileError as unfused:
                constants = Constants()
                try:
                    models, program = _traced(stages, options, sizes, constants, workspace)
                except CompileError as e:
                    raise CompileError(f"{e}; and no fused form: {unfused}") from e
            tables = io.BytesIO()
            np.savez(tables, **constants.tables)  # type: ignore[arg-type]
            recipes = json.dumps([r.to_json() for r in constants.recipes], sort_keys=True)
            return {
                **{name: workspace.put_bytes(xml.encode()) for name, xml in models.items()},
                "program": workspace.put_bytes(program.encode()),
                "recipes": workspace.put_bytes(recipes.encode()),
                "tables": workspace.put_bytes(tables.getvalue()),
            }

        return stages.run("lower", components, build)

    def _finish(
        self, stages: Stages, options: CompileOptions, sizes: Sequence[Sizes], lowered: Entry, weights: Entry
    ) -> Entry:
        properties = self.properties(options)
        components = {
            **{_name(s): lowered.outputs[_name(s)].digest for s in sizes},
            "weights": weights.outputs["weights"].digest,
            "placements": weights.outputs["placements"].digest,
            "properties": json.dumps(properties, sort_keys=True),
            **toolchain(*self.toolchain()),
            "isa": " ".join(self.isa()),
            "code": code_digest(*_FINISH_CODE),
        }

        def build(workspace: Workspace) -> Mapping[str, Blob]:
            from llmc.compiler.lowering.recipes import Placement
            from llmc.compiler.openvino.blobs import weightless
            from llmc.compiler.openvino.constants import place
            from llmc.compiler.openvino.finish import FinishedWeights
            from llmc.runtime.openvino.device import MappedWeights, open_core

            placements = json.loads(stages.store.get_bytes(weights.outputs["placements"].digest))
            places = {name: Placement(p["offset"], p["length"]) for name, p in placements.items()}
            mapped = MappedWeights(stages.path(weights.outputs["weights"]))
            made = {}
            with workspace.writer() as out:
                file = FinishedWeights(out)
                for name in map(_name, sizes):
                    xml = place(stages.store.get_bytes(lowered.outputs[name].digest).decode(), places)
                    model = open_core().read_model(xml.encode(), mapped.tensor)
                    made[name] = workspace.put_bytes(weightless(model, properties, file))
            assert out.blob is not None
            return {"weights": out.blob, **made}

        return stages.run("finish", components, build)


def _weights(stages: Stages, lowered: Entry) -> Entry:
    from llmc.compiler.weight_stage import weights_stage

    return weights_stage(stages, lowered.outputs["recipes"], lowered.outputs["tables"], *_FAMILIES)


def _fused(
    stages: Stages, options: CompileOptions, sizes: Sequence[Sizes], constants: Constants, workspace: Workspace
) -> tuple[dict[str, str], str]:  # fmt: skip
    """XML of every shape from the fused graph, and the graph as text."""
    from llmc.compiler.frontend.trace import trace
    from llmc.compiler.lowering.fuse import fuse
    from llmc.compiler.lowering.import_fx import import_program
    from llmc.compiler.openvino.constants import to_xml
    from llmc.compiler.openvino.static import static_model

    graph = fuse(import_program(trace(stages.checkpoint.config, "fused"), stages.max_positions))
    weights = _format(options)(constants)
    models = {}
    for shape in sizes:
        models[_name(shape)] = to_xml(static_model(graph, weights, *shape, options.sample_top_k), workspace.folder)
    return models, graph.text()


def _traced(
    stages: Stages, options: CompileOptions, sizes: Sequence[Sizes], constants: Constants, workspace: Workspace
) -> tuple[dict[str, str], str]:  # fmt: skip
    """XML of every shape from the traced program, and that."""
    from llmc.compiler.frontend.trace import trace_weightless
    from llmc.compiler.lowering.to_export import serialise
    from llmc.compiler.openvino.constants import to_xml
    from llmc.compiler.openvino.portable import portable_model
    from llmc.compiler.xla.program import TracedProgram

    weights = _format(options)(constants)
    models, programs = {}, {}
    for shape in sizes:
        cached = shape[2] > 0
        if cached not in programs:
            traced = trace_weightless(stages.checkpoint.config, "two_part", cached=cached, top_k=options.sample_top_k)
            data = json.dumps(serialise(traced.exported), sort_keys=True).encode()
            tables = {name: b.float().numpy() for name, b in traced.buffers.items()}
            programs[cached] = TracedProgram.parse(data), tables, data
        program, tables, _ = programs[cached]
        model = portable_model(program, tables, weights, stages.max_positions, *shape)
        models[_name(shape)] = to_xml(model, workspace.folder)
    return models, "\n".join(data.decode() for _, _, data in programs.values())


def _format(options: CompileOptions) -> Callable[[Constants], Any]:
    from llmc.compiler.openvino.formats import format_for

    return format_for(str(options.quantize), options.dtype)


def _sizes(shape: Shape) -> Sizes:
    assert shape.batch is not None
    assert shape.query is not None
    assert shape.context is not None
    return shape.batch, shape.query, shape.context


def _name(sizes: Sizes) -> str:
    return "model_" + "_".join(map(str, sizes))
