"""The traced program of an encoder without a tensor in it, and its weights in a file beside it: for compilers that take
weights as inputs. The same for all of them, so that a checkpoint is traced once for every such device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmc.artifacts.key import canonical_json
from llmc.compiler.code import code_digest
from llmc.compiler.program.stage import DTYPES, TRANSFORMS
from llmc.compiler.stages import toolchain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.workspace import Workspace
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.encoders.base import Case
    from llmc.compiler.weights.weightless import Described


def traced_weightless(stages: Stages, case: Case, options: CompileOptions) -> Entry:
    """An entry with `program` (torch's model.json), `tensors` (tensors.json of weights/weightless.py), `weights` and
    `placements`; its meta has the names of the program's `inputs`, and whether it has `type_ids`.

    Weights are in the options' dtype, and quantised as they say; computed constants in float32 or int32. Raises
    CheckpointError and CompileError.
    """
    components = {
        **case.components(stages),
        "dialect": "weightless",
        "quantize": options.quantize,
        "dtype": options.dtype,
        **toolchain("torch", "transformers", "numpy", "sympy", python=True),
        "code": code_digest(traced_weightless),
    }

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        import torch

        from llmc.compiler.frontend.encode import Encode, trace_weightless_encoder
        from llmc.compiler.program.to_export import serialise
        from llmc.compiler.targets.xla.formats import described_as
        from llmc.compiler.weights.module import ModuleTensors
        from llmc.compiler.weights.stage import written_weights

        model = Encode(stages.checkpoint, case.task, case.judges)
        traced = trace_weightless_encoder(model, getattr(torch, DTYPES[options.dtype]))
        tables = {name: _table(buffer.numpy()) for name, buffer in traced.buffers.items()}
        described: Sequence[Described] = [
            {
                "name": name, "transform": TRANSFORMS[options.dtype], "shape": shape, "dtype": DTYPES[options.dtype],
                "sources": [name],
            }
            for name, shape in traced.parameters.items()
        ] + [
            {"name": name, "transform": "table", "shape": array.shape, "dtype": str(array.dtype), "sources": []}
            for name, array in tables.items()
        ]  # fmt: skip
        stack = described_as(False, str(options.quantize))
        described = stack(described) if stack else described
        workspace.meta |= {"type_ids": model.typed, "inputs": list(model.inputs)}
        return {
            "program": workspace.put_bytes(canonical_json(serialise(traced.exported))),
            "tensors": workspace.put_bytes(canonical_json(list(described))),
            **written_weights(described, ModuleTensors(model), tables, workspace),
        }

    return stages.run("encoder", components, build)


def _table(array: NDArray[Any]) -> NDArray[Any]:
    """A computed constant in a dtype that executables take."""
    return array.astype("float32" if array.dtype.kind == "f" else "int32")
