"""Changes to a whole lowered ONNX model: names, top logits, fixed sizes, and tensor offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import ModelProto, TensorProto, helper


def shorten(model: ModelProto) -> dict[str, str]:
    """Rename everything inside the graph to a few characters; returns old name → new name.

    ONNX Runtime keeps every name several times in every session, and strings of up to 15 characters need no allocation:
    this saves 5% of an open executable's memory. Inputs, outputs and outputs of a loop's body keep their names; bodies
    are not nested.
    """
    kept = {info.name for info in (*model.graph.input, *model.graph.output)} | {""}
    names: dict[str, str] = {}

    def short(name: str) -> str:
        return name if name in kept else names.setdefault(name, f"t{len(names)}")

    for node in model.graph.node:
        node.ClearField("name")
        for field in (node.input, node.output):
            for i, name in enumerate(field):
                field[i] = short(name)
        for attribute in node.attribute:
            inside = attribute.g.node
            own = {built for part in inside for built in part.output} | {info.name for info in attribute.g.input}
            for part in inside:
                part.input[:] = [name if name in own else short(name) for name in part.input]
    for tensor in model.graph.initializer:
        tensor.name = short(tensor.name)
    return names


def add_top(model: ModelProto, k: int) -> ModelProto:
    """Return a copy of `model` with the `k` largest logits, descending, and their ids, both [B, k]; unchanged for 0.

    TopK returns the lower index first for equal values, as the operator's specification says.
    """
    topped = ModelProto()
    topped.CopyFrom(model)
    if not k:
        return topped
    graph = topped.graph
    rows = next(o for o in graph.output if o.name == "logits").type.tensor_type.shape.dim[0].dim_param
    graph.initializer.append(helper.make_tensor("top_k", TensorProto.INT64, [1], [k]))
    graph.node.append(helper.make_node("TopK", ["logits", "top_k"], ["top_values", "top_ids"], axis=-1))
    for at, (name, dtype) in enumerate((("top_values", TensorProto.FLOAT), ("top_ids", TensorProto.INT64)), 1):
        graph.output.insert(at, helper.make_tensor_value_info(name, dtype, [rows, k]))
    return topped


def bind(model: ModelProto, dims: Mapping[str, int]) -> ModelProto:
    """Return a copy of `model` with the named symbolic dimensions of inputs and outputs fixed."""
    bound = ModelProto()
    bound.CopyFrom(model)
    for info in (*bound.graph.input, *bound.graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in dims:
                dim.dim_value = dims[dim.dim_param]
    return bound


def offset_symbols(model: ModelProto) -> dict[str, str]:
    """Map the entry of each cached key and value ("k3") to the symbol of its number of slots."""
    caches = {
        info.name.removeprefix("past_"): info.type.tensor_type.shape.dim
        for info in model.graph.input
        if info.name.startswith("past_")
    }
    return {entry: dims[2].dim_param for entry, dims in caches.items() if len(dims) == 4 and dims[2].dim_param}


def load_model(data: bytes) -> ModelProto:
    """Parse an ONNX model."""
    return ModelProto.FromString(data)


def set_placements(model: ModelProto, location: str, placements: Mapping[str, Mapping[str, Any]]) -> ModelProto:
    """Return a copy of `model` whose tensors refer to the weights file `location`.

    A placement has offset and length in bytes, and any other external-data entries of the runtime, as strings.
    """
    placed = ModelProto()
    placed.CopyFrom(model)
    for tensor in placed.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            del tensor.external_data[:]
            for key, value in (("location", location), *placements[tensor.name].items()):
                tensor.external_data.add(key=key, value=str(value))
    return placed
