"""ATen operators that no kernel fuses, as standard ONNX: one function an operator, by its name in the graph language.

Shapes stay symbolic: nothing here writes a size of the batch or of the tokens into the graph. Sources: the schemas of
aten/src/ATen/native/native_functions.yaml (torch 2.13) and of ONNX operators (opset 21).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.errors import CompileError

if TYPE_CHECKING:
    from llmc.compiler.program.ir import Node
    from llmc.compiler.targets.onnxruntime.emitter import Emitter

_INT64_MAX = 2**63 - 1


def _unary(op: str, **attrs: Any) -> Callable[[Emitter, Node], None]:
    def emit(to: Emitter, node: Node) -> None:
        to.add(op, [to.name(node.inputs[0])], [node.out.name], **attrs)

    return emit


def _binary(op: str) -> Callable[[Emitter, Node], None]:
    """Of two tensors, or a tensor and a number (`other`, `exponent`); add and sub may scale the second by `alpha`."""

    def emit(to: Emitter, node: Node) -> None:
        operands = [to.name(v) for v in node.inputs]
        number = node.attrs.get("other", node.attrs.get("exponent"))
        if number is not None:
            operands.append(to.const(number, np.float32))
        if node.attrs.get("alpha", 1) != 1:
            scale = to.const(node.attrs["alpha"], np.float32)
            operands[1] = to.add("Mul", [operands[1], scale], [f"{node.out.name}_scaled"])
        to.add(op, operands, [node.out.name])

    return emit


def _rsqrt(to: Emitter, node: Node) -> None:
    to.add("Sqrt", [to.name(node.inputs[0])], [f"{node.out.name}_root"])
    to.add("Reciprocal", [f"{node.out.name}_root"], [node.out.name])


def _gelu(to: Emitter, node: Node) -> None:
    to.add("Gelu", [to.name(node.inputs[0])], [node.out.name], approximate=node.attrs.get("approximate", "none"))


def _silu(to: Emitter, node: Node) -> None:
    to.add("QuickGelu", [to.name(node.inputs[0])], [node.out.name], "com.microsoft", alpha=1.0)


def _reduced(op: str) -> Callable[[Emitter, Node], None]:
    def emit(to: Emitter, node: Node) -> None:
        axes = to.const(node.attrs["dim"])
        to.add(op, [to.name(node.inputs[0]), axes], [node.out.name], keepdims=int(node.attrs.get("keepdim", False)))

    return emit


def _layer_norm(to: Emitter, node: Node) -> None:
    if len(node.attrs["normalized_shape"]) != 1:
        raise CompileError(f"layer_norm over {node.attrs['normalized_shape']} has no ONNX lowering (at {node.out})")
    x, weight, bias = (*node.inputs, None, None)[:3]
    ones = to.const(np.ones(node.attrs["normalized_shape"]), np.float32)
    inputs = [to.name(x), to.name(weight) or ones, *([to.name(bias)] if bias else [])]
    eps = float(node.attrs.get("eps", 1e-5))
    to.normed.add(node.out)
    to.add("LayerNormalization", inputs, [node.out.name], axis=-1, epsilon=eps, stash_type=1)


def _cat(to: Emitter, node: Node) -> None:
    to.add("Concat", [to.name(v) for v in node.inputs], [node.out.name], axis=int(node.attrs.get("dim", 0)))


def _slice(to: Emitter, node: Node) -> None:
    start, end = node.attrs.get("start") or 0, node.attrs.get("end")
    end = _INT64_MAX if end is None else end
    if not (isinstance(start, int) and isinstance(end, int)):
        raise CompileError(f"slice from {start} to {end} has no ONNX lowering (at {node.out})")
    bounds = [to.const([n]) for n in (start, end, node.attrs.get("dim", 0), node.attrs.get("step", 1))]
    to.add("Slice", [to.name(node.inputs[0]), *bounds], [node.out.name])


def _transpose(to: Emitter, node: Node) -> None:
    source = node.inputs[0]
    assert source is not None
    order = list(range(len(source.shape)))
    a, b = node.attrs["dim0"], node.attrs["dim1"]
    order[a], order[b] = order[b], order[a]
    to.add("Transpose", [to.name(source)], [node.out.name], perm=order)


def _unsqueeze(to: Emitter, node: Node) -> None:
    to.add("Unsqueeze", [to.name(node.inputs[0]), to.const([node.attrs["dim"]])], [node.out.name])


def _softmax(to: Emitter, node: Node) -> None:
    to.add("Softmax", [to.name(node.inputs[0])], [node.out.name], axis=int(node.attrs["dim"]))


def _chunk_like(to: Emitter, node: Node) -> None:
    """`split`, `split_with_sizes` and `chunk`: pieces as long as the outputs are."""
    axis = int(node.attrs.get("dim", 0))
    parts = [o.shape[axis] for o in node.outputs]
    if not all(isinstance(n, int) for n in parts):
        raise CompileError(f"{node.op} along a dimension of unknown size has no ONNX lowering (at {node.out})")
    to.add("Split", [to.name(node.inputs[0]), to.const(parts)], [o.name for o in node.outputs], axis=axis)


def _position_table(to: Emitter, node: Node) -> None:
    """Rows of a table by each token's position, [B, Q, D] or, for heads, [B, 1, Q, D]."""
    positions = to.positions()
    axis = len(node.out.shape) - 3
    out = f"{node.out.name}_rows" if axis else node.out.name
    to.add("Gather", [to.name(node.inputs[0]), positions], [out])
    if axis:
        to.add("Unsqueeze", [out, to.const([1])], [node.out.name])


PLAIN: Mapping[str, Callable[[Emitter, Node], None]] = {
    "add": _binary("Add"), "sub": _binary("Sub"), "mul": _binary("Mul"), "div": _binary("Div"), "pow": _binary("Pow"),
    "neg": _unary("Neg"), "tanh": _unary("Tanh"), "sigmoid": _unary("Sigmoid"), "relu": _unary("Relu"),
    "exp": _unary("Exp"), "softplus": _unary("Softplus"), "sqrt": _unary("Sqrt"), "rsqrt": _rsqrt, "gelu": _gelu,
    "silu": _silu, "mean": _reduced("ReduceMean"), "sum": _reduced("ReduceSum"), "layer_norm": _layer_norm,
    "cat": _cat, "slice": _slice, "transpose": _transpose, "unsqueeze": _unsqueeze, "softmax": _softmax,
    "split": _chunk_like, "split_with_sizes": _chunk_like, "chunk": _chunk_like, "position_table": _position_table,
}  # fmt: skip
"""By the operator's name, as program/ir.py writes it."""
