"""Graphs written by hand, and what they compute: by ATen's own operators, and lowered to ONNX."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmc.compiler.frontend import attention as _operators  # noqa: F401 - registers llmc's
from llmc.compiler.program.ir import Dim, Graph, Node, Value
from llmc.compiler.targets.onnxruntime.formats import OnnxOptions
from llmc.compiler.targets.onnxruntime.onnx_model import set_placements
from llmc.compiler.targets.onnxruntime.to_onnx import to_onnx
from llmc.compiler.weights.recipes import write_weights
from llmc.runtime.executors.onnxruntime.session import open_session

Array = NDArray[np.float32]
FLOAT32 = OnnxOptions(0)


class Sketch:
    """Writes small graphs: `sketch.mul(x, y)` appends a node and returns its output, shaped like its first input."""

    def __init__(self) -> None:
        self.graph = Graph({}, [], [], {}, {})
        self._count = 0

    def input(self, name: str, *shape: Dim, dtype: str = "float32") -> Value:
        value = self.graph.inputs[name] = Value(name, shape, dtype)
        return value

    def weight(self, name: str, *shape: int) -> Value:
        value = Value(name, shape, "float32")
        self.graph.weights[value] = name
        return value

    def table(self, name: str, array: Array) -> Value:
        value = Value(name, array.shape, "float32")
        self.graph.tables[value] = array
        return value

    def node(
        self, op: str, *inputs: Value | None, shapes: Sequence[tuple[Dim, ...]],
        dtype: str | Sequence[str] = "float32", **attrs: Any,
    ) -> Node:  # fmt: skip
        self._count += 1
        types = [dtype] if isinstance(dtype, str) else dtype
        outputs = [Value(f"{op}_{self._count}_{i}", shape, types[i % len(types)]) for i, shape in enumerate(shapes)]
        built = Node(op, list(inputs), outputs, attrs)
        self.graph.nodes.append(built)
        return built

    def __getattr__(self, op: str) -> Callable[..., Value]:
        def make(*inputs: Value | None, shape: tuple[Dim, ...] | None = None, **attrs: Any) -> Value:
            assert inputs[0] is not None
            return self.node(op, *inputs, shapes=[shape or inputs[0].shape], **attrs).out

        return make

    def linear(self, x: Value, weight: Value, bias: Value | None = None) -> Value:
        shape = (*x.shape[:-1], weight.shape[0])
        return self.node("linear", *([x, weight] + ([bias] if bias else [])), shapes=[shape]).out

    def done(self, *outputs: Value) -> Graph:
        self.graph.outputs = [(f"out{i}", v) for i, v in enumerate(outputs)]
        return self.graph

    def norm(self, x: Value, weight: Value, **changes: Any) -> Value:
        """weight · (x · rsqrt(mean(x²) + eps)), or with `changes` something that only looks so."""
        squares = self.pow(changes.get("squared", x), exponent=changes.get("exponent", 2))
        reduced = (*x.shape[:-1], 1)
        mean = self.mean(squares, dim=changes.get("dim", [-1]), keepdim=True, shape=reduced)
        if "eps" in changes:
            root = self.rsqrt(self.add(mean, changes["eps"]))
        else:
            root = getattr(self, changes.get("root", "rsqrt"))(self.add(mean, other=1e-5))
        operands = (x, root) if not changes.get("turned") else (root, x)
        scaled = self.mul(*operands, shape=x.shape)
        return self.mul(weight, scaled, shape=x.shape) if not changes.get("turned") else self.mul(scaled, weight)


def by_torch(graph: Graph, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """The outputs of a graph that is not fused."""
    values = {v: torch.from_numpy(feed[name]) for name, v in graph.inputs.items()}
    values |= {v: torch.from_numpy(weight_of(name, v.shape)) for v, name in graph.weights.items()}
    values |= {v: torch.from_numpy(t) for v, t in graph.tables.items()}
    pairs = [pair for name, v in graph.inputs.items() for pair in zip(v.shape, feed[name].shape, strict=True)]
    symbols = {dim: size for dim, size in pairs if isinstance(dim, str)}
    for node in graph.nodes:
        if node.op in _BUILT:
            values[node.out] = _BUILT[node.op]([symbols.get(d, d) for d in node.out.shape])
            continue
        given = [None if v is None else values[v] for v in node.inputs]
        built = (
            _OWN[node.op](node, *given) if node.op in _OWN else getattr(torch.ops.aten, node.op)(*given, **node.attrs)
        )
        values |= zip(node.outputs, [built] if isinstance(built, torch.Tensor) else built, strict=True)
    return [values[v].numpy() for _, v in graph.outputs]


def by_onnx(
    graph: Graph, feed: Mapping[str, NDArray[Any]], options: OnnxOptions = FLOAT32, library: Path | None = None
) -> list[NDArray[Any]]:
    """The outputs of a graph, run by ONNX Runtime: in float32, or with llmc's own operators of `library`."""
    built = to_onnx(graph, options)
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "weights").open("wb") as out:
            placed = write_weights(built.recipes, _Weights(graph), built.tables, out)
        offsets = {name: {"offset": p.offset, "length": p.length} for name, p in placed.items()}
        model = set_placements(built.model, "weights", offsets).SerializeToString()
        session = open_session(
            model, library=library and str(library), session__model_external_initializers_file_folder_path=folder
        )
        read = {i.name for i in session.get_inputs()}
        outputs: list[NDArray[Any]] = session.run(None, {name: array for name, array in feed.items() if name in read})
    return outputs


class _Weights:
    """A source of the weights of a graph, which follow from their names."""

    def __init__(self, graph: Graph) -> None:
        self.shapes = {name: v.shape for v, name in graph.weights.items()}

    def tensor_names(self) -> Sequence[str]:
        return list(self.shapes)

    def tensor(self, name: str) -> Array:
        return weight_of(name, self.shapes[name])

    def quantised_blocks(self, name: str) -> None:
        return None

    reordered_blocks = quantised_blocks


def weight_of(name: str, shape: Sequence[Dim]) -> Array:
    random = np.random.default_rng(sum(name.encode()))
    return random.normal(0, 0.5, [int(d) for d in shape]).astype(np.float32)


def _sizes(node: Node, x: torch.Tensor) -> list[int]:
    """Of a view or an expansion: what stands where it stood is as large as it was, one other symbol is the rest."""
    source = node.inputs[0]
    assert source is not None
    kept = dict(enumerate(zip(source.shape, x.shape, strict=True)))
    return [d if isinstance(d, int) else kept[i][1] if kept.get(i, (0,))[0] == d else -1
            for i, d in enumerate(node.out.shape)]  # fmt: skip


def _positions(node: Node, past: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return (past[:, None] + torch.arange(ids.shape[1]) + node.attrs["offset"]).clamp(max=node.attrs["last"])


def _position_table(node: Node, table: torch.Tensor, past: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows = table[past[:, None] + torch.arange(ids.shape[1])]
    return rows[:, None] if len(node.out.shape) == 4 else rows


_BUILT: dict[str, Callable[[list[Any]], torch.Tensor]] = {
    "arange": lambda shape: torch.arange(shape[0]), "zeros": torch.zeros, "new_ones": torch.ones,
}  # fmt: skip
"""Of no other value: by the shape alone."""

_OWN: dict[str, Callable[..., Any]] = {
    "position_table": _position_table,
    "positions": _positions,
    "to": lambda node, x: x.to(getattr(torch, node.out.dtype)),
    "_to_copy": lambda node, x: x.to(getattr(torch, node.out.dtype)),
    "expand": lambda node, x: x.expand(*_sizes(node, x)),
    "stack": lambda node, *given: torch.stack(given, **node.attrs),
    "gather": lambda node, x, at: torch.gather(x, index=at, **node.attrs),
    "scatter": lambda node, x, at, *given: torch.scatter(
        x, index=at, **node.attrs, **dict(zip(("src",), given, strict=False))
    ),
    "index": lambda node, x, *ids: torch.ops.aten.index(x, ids),
    "attention": lambda node, *given: torch.ops.llmc.attention(
        *given[:7], **node.attrs, **dict(zip(("by_offset",), given[7:], strict=False))
    ),
    "layer_norm": lambda node, x, weight, bias: torch.layer_norm(x, weight=weight, bias=bias, **node.attrs),
    "cat": lambda node, *given: torch.cat(given, **node.attrs),
    "concat": lambda node, *given: torch.cat(given, **node.attrs),
    "view": lambda node, x: x.reshape(_sizes(node, x)),
    "reshape": lambda node, x: x.reshape(_sizes(node, x)),
}
