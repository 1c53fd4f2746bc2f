"""ATen operators in OpenVINO's opset: one function per operator, by its name.

Each takes the model under construction and the node, and returns the model's values; the first functions define their
layout. Sources: the schemas of aten/src/ATen/native/native_functions.yaml (torch 2.13) and of OpenVINO's opset 13.

Tokens are packed in an OpenVINO model. A value [B, Q, …], [B, …, Q, …] or [B·Q, …] of the graph is [T, …] in the model,
T being all tokens, and [B, …] after `last_rows` is [R, …]: the first axis is the batch and its tokens, and the others
follow in the graph's order. A transpose that moves only tokens is therefore a no-op. A value [n·B·Q, …], the heads of
all tokens, is [T, n, …].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino import opset15

from llmc.compiler.program.ir import Dim, Graph, Node, Value
from llmc.compiler.targets.openvino.formats import WeightFormat
from llmc.errors import CompileError

BATCH, TOKENS = "B", "Q"


def token_axes(shape: Sequence[Dim]) -> tuple[int, ...]:
    """Return the axes that are one in the model; () for a value without tokens."""
    if not shape or (shape[0] != BATCH and not heads_apart(shape)):
        return ()
    found = [i for i, dim in enumerate(shape) if i and dim == TOKENS]
    return (0, *found[:1])


def heads_apart(shape: Sequence[Dim]) -> int:
    """Return n of a value [n·B·Q, …], as the tracer writes matmuls: 1 where tokens have no heads; 0 for others."""
    factors = sorted(str(shape[0]).split("*")) if shape else []
    numbers, symbols = factors[:-2], factors[-2:]
    return math.prod(map(int, numbers)) if symbols == [BATCH, TOKENS] and all(n.isdecimal() for n in numbers) else 0


def others(shape: Sequence[Dim], what: object) -> list[int]:
    """Return the sizes of the other axes of a value [T, …], or all of one without tokens.

    Raises CompileError, naming `what`, for a symbolic size.
    """
    held = token_axes(shape)
    found = [dim for i, dim in enumerate(shape) if i not in held]
    if heads_apart(shape) > 1:
        found.insert(0, heads_apart(shape))
    if not all(isinstance(dim, int) for dim in found):
        raise CompileError(f"a size of {', '.join(map(str, shape))} has no OpenVINO lowering (at {what})")
    return [int(dim) for dim in found]


def axis_of(value: Value, axis: int, what: object) -> int:
    """Return the model's axis for an axis of the graph. Raises CompileError for a token or row axis."""
    axis %= len(value.shape)
    held = token_axes(value.shape)
    if axis in held:
        raise CompileError(f"an operator along batch or tokens has no OpenVINO lowering (at {what})")
    return bool(held) + (heads_apart(value.shape) > 1) + sum(i not in held for i in range(axis))


def order_of(source: Value, order: Sequence[int], what: object) -> list[int]:
    """Return the model's permutation for `order` of the graph's axes."""
    held = token_axes(source.shape)
    if heads_apart(source.shape) > 1:
        raise CompileError(f"a transposition of the heads of all tokens has no OpenVINO lowering (at {what})")
    moved = [axis_of(source, axis, what) for axis in order if axis % len(source.shape) not in held]
    return ([0] if held else []) + moved


def beside(value: Value, out: Value, what: object) -> list[int] | None:
    """Return the shape by which an operand without tokens broadcasts with others of `out`; None: unchanged.

    Raises CompileError where the operand's token axes differ from those of `out`.
    """
    held = token_axes(out.shape)
    if token_axes(value.shape):
        if len(value.shape) != len(out.shape) or token_axes(value.shape) != held:
            raise CompileError(f"{value} and {out} have tokens along other axes: no OpenVINO lowering (at {what})")
        return None
    padded = [1] * (len(out.shape) - len(value.shape)) + others(value.shape, what)
    if any(padded[i] != 1 for i in held):
        raise CompileError(f"{value} has sizes of its own for tokens: no OpenVINO lowering (at {what})")
    wanted = [size for i, size in enumerate(padded) if i not in held]
    given = list(value.shape)
    while len(wanted) > len(given) and wanted[0] == 1:
        wanted.pop(0)
    return None if wanted == given else wanted


_INT32_MAX = 2**31 - 1
_TYPES = {"float32": ov.Type.f32, "int64": ov.Type.i64, "int32": ov.Type.i32, "bool": ov.Type.boolean}
_GELU = {"none": "ERF", "tanh": "TANH"}


def shape_of(value: Value) -> tuple[int, ...]:
    """Return a shape without symbols."""
    return tuple(int(d) for d in value.shape)


class Building:
    """A model under construction. `inputs` has "position_ids" [T]."""

    def __init__(self, graph: Graph, weights: WeightFormat) -> None:
        self.graph, self.weights, self.constants = graph, weights, weights.constants
        self.inputs: Mapping[str, Any] = {}
        self._built: dict[Value, Any] = {}

    def get(self, value: Value | None) -> Any:
        """Return the model's node for a graph value. Raises CompileError where there is none."""
        assert value is not None
        if value in self._built:
            return self._built[value]
        if value in self.graph.weights:
            return self.weights.vector(self.graph.weights[value], shape_of(value))
        if value in self.graph.tables:
            return self.constants.table(value.name, self.graph.tables[value])
        raise CompileError(f"{value} has no value in an OpenVINO model")

    def flat_matrix(self, value: Value) -> Any:
        """Return a weight [E, N, K] in the format's matrix form: [E · N, K]."""
        *embed_lm_head, width = shape_of(value)
        return self.weights.matrix([self.graph.weights[value]], [(math.prod(embed_lm_head), width)])


Emit = Callable[[Building, Node], Any]


def _number(to: Building, value: Any, like: Value | None) -> Any:
    assert like is not None
    return to.constants.small(value, np.dtype(like.dtype).type)


def _along(node: Node, name: str = "dim", default: int = 0) -> int:
    return axis_of(node.value(0), int(node.attrs.get(name, default)), node.out)


def _operand(to: Building, value: Value | None, node: Node) -> Any:
    assert value is not None
    shape = beside(value, node.out, node.out)
    built = to.get(value)
    return built if shape is None else ops.reshape(built, to.constants.small(shape), False)


def _unary(emit: Callable[[Any], Any]) -> Emit:
    return lambda to, node: emit(to.get(node.inputs[0]))


def _binary(emit: Callable[[Any, Any], Any], turned: bool = False) -> Emit:
    """Operator on two tensors, or a tensor and a number (`other`, `exponent`); `alpha` scales the second."""

    def emitted(to: Building, node: Node) -> Any:
        operands = [_operand(to, v, node) for v in node.inputs]
        number = node.attrs.get("other", node.attrs.get("exponent"))
        if number is not None:
            operands.append(_number(to, number, node.inputs[0]))
        if node.attrs.get("alpha", 1) != 1:
            operands[1] = ops.multiply(operands[1], _number(to, node.attrs["alpha"], node.inputs[0]))
        return emit(*(operands[::-1] if turned else operands))

    return emitted


def _clamp(to: Building, node: Node) -> Any:
    """Bounds are numbers, or tensors after the first input."""
    built, bounds = to.get(node.inputs[0]), (*node.inputs[1:], None, None)
    for name, bound, given in zip(("min", "max"), (ops.maximum, ops.minimum), bounds, strict=False):
        if given is not None:
            built = bound(built, _operand(to, given, node))
        elif node.attrs.get(name) is not None:
            built = bound(built, _number(to, node.attrs[name], node.inputs[0]))
    return built


def _where(to: Building, node: Node) -> Any:
    """Either side may be a number."""
    condition, *sides = node.inputs
    built = [_operand(to, v, node) for v in sides]
    for at, key in ((0, "self"), (1, "other")):
        if key in node.attrs:
            built.insert(at, _number(to, node.attrs[key], node.out))
    return ops.select(_operand(to, condition, node), *built)


def _masked_fill(to: Building, node: Node) -> Any:
    x, mask = node.inputs[:2]
    value = to.get(node.inputs[2]) if len(node.inputs) > 2 else _number(to, node.attrs["value"], x)
    return ops.select(_operand(to, mask, node), value, _operand(to, x, node))


def _filled(number: float | None) -> Emit:
    """`number`, or the operator's own, in the shape of the first input."""

    def emit(to: Building, node: Node) -> Any:
        value = node.attrs["fill_value"] if number is None else number
        return ops.broadcast(_number(to, value, node.out), ops.shape_of(to.get(node.inputs[0])))

    return emit


def _reduced(emit: Callable[..., Any]) -> Emit:
    def emitted(to: Building, node: Node) -> Any:
        dims = node.attrs.get("dim")
        if dims is None:
            raise CompileError(f"{node.op} over all axes has no OpenVINO lowering (at {node.out})")
        axes = [axis_of(node.value(0), d, node.out) for d in (dims if isinstance(dims, list) else [dims])]
        return emit(to.get(node.inputs[0]), to.constants.small(axes), bool(node.attrs.get("keepdim", False)))

    return emitted


def _layer_norm(to: Building, node: Node) -> Any:
    """In the form that OpenVINO fuses; over the last axis."""
    if len(node.attrs["normalized_shape"]) != 1:
        raise CompileError(f"layer_norm over {node.attrs['normalized_shape']} has no OpenVINO lowering")
    x, weight, bias = (*node.inputs, None, None)[:3]
    eps = float(node.attrs.get("eps", 1e-5))
    built = ops.mvn(to.get(x), to.constants.small([-1]), True, eps, "inside_sqrt")
    built = ops.multiply(built, to.get(weight)) if weight is not None else built
    return ops.add(built, to.get(bias)) if bias is not None else built


def _reshape(to: Building, node: Node) -> Any:
    """Tokens stay one axis; the axes before and after them keep their order."""
    source, out = node.value(0), node.out
    ends = source.shape, out.shape
    moved = max(map(heads_apart, ends)) > 1 and any(token_axes(shape) not in ((0,), (0, 1)) for shape in ends)
    if moved or bool(token_axes(source.shape)) != bool(token_axes(out.shape)):
        raise CompileError(f"a reshape of tokens into {out.shape} has no OpenVINO lowering (at {out})")
    tokens = [-1] if token_axes(out.shape) else []
    return ops.reshape(to.get(source), to.constants.small([*tokens, *others(out.shape, out)]), False)


def _transposed(to: Building, source: Value, order: list[int], node: Node) -> Any:
    built, moved = to.get(source), order_of(source, order, node.out)
    return built if moved == sorted(moved) else ops.transpose(built, to.constants.small(moved))


def _transpose(to: Building, node: Node) -> Any:
    source = node.value(0)
    order = list(range(len(source.shape)))
    a, b = node.attrs["dim0"], node.attrs["dim1"]
    order[a], order[b] = order[b], order[a]
    return _transposed(to, source, order, node)


def _slice(to: Building, node: Node) -> Any:
    start, end = node.attrs.get("start") or 0, node.attrs.get("end")
    bounds = [start, _INT32_MAX if end is None else end]
    if not all(isinstance(n, int) for n in bounds):
        raise CompileError(f"slice from {start} to {end} has no OpenVINO lowering (at {node.out})")
    offsets = [min(bounds[0], _INT32_MAX), min(bounds[1], _INT32_MAX), node.attrs.get("step", 1), _along(node)]
    return ops.slice(to.get(node.inputs[0]), *(to.constants.small([n]) for n in offsets))


def _split(to: Building, node: Node) -> Any:
    """`split`, `split_with_sizes` and `chunk`: the outputs determine the sizes."""
    axis = int(node.attrs.get("dim", -1 if "parts" in node.attrs else 0))
    parts = [o.shape[axis] for o in node.outputs]
    at = axis_of(node.value(0), axis, node.out)
    small = to.constants.small
    return list(ops.variadic_split(to.get(node.inputs[0]), small(at), small(parts)).outputs())


def _stack(to: Building, node: Node) -> Any:
    at = to.constants.small([axis_of(node.out, int(node.attrs.get("dim", 0)), node.out)])
    return ops.concat([ops.unsqueeze(to.get(v), at) for v in node.inputs], int(at.data[0]))


def _expand(to: Building, node: Node) -> Any:
    """A value with tokens is repeated along its other axes."""
    source = node.value(0)
    if token_axes(source.shape) != token_axes(node.out.shape):
        raise CompileError(f"tokens built by repetition have no OpenVINO lowering (at {node.out})")
    times = [1] * (len(token_axes(source.shape)) > 0)
    given, wanted = others(source.shape, node.out), others(node.out.shape, node.out)
    times += [n // g for g, n in zip(given, wanted, strict=True)]
    return ops.tile(to.get(source), to.constants.small(times))


def _repeat_interleave(to: Building, node: Node) -> Any:
    source, count = node.value(0), node.attrs.get("repeats", node.attrs.get("repeat"))
    if node.attrs.get("dim") is None or not isinstance(count, int):
        raise CompileError(f"repeat_interleave by {node.attrs} has no OpenVINO lowering (at {node.out})")
    axis = _along(node)
    ids = np.repeat(np.arange(int(source.shape[node.attrs["dim"] % len(source.shape)])), count)
    return ops.gather(to.get(source), to.constants.small(ids), to.constants.small(axis))


def _unbind(to: Building, node: Node) -> Any:
    axis = to.constants.small(_along(node))
    return [ops.gather(to.get(node.inputs[0]), to.constants.small(at), axis) for at in range(len(node.outputs))]


def _index(to: Building, node: Node) -> Any:
    """Rows of a table, by an index for each token."""
    source, at = node.value(0), node.inputs[1]
    if len(node.inputs) != 2 or at is None or at.dtype == "bool" or token_axes(source.shape):
        raise CompileError(f"indexing along other axes than a table's first has no OpenVINO lowering (at {node.out})")
    return ops.gather(to.get(source), to.get(at), to.constants.small(0))


def _scatter(to: Building, node: Node) -> Any:
    """The source is a tensor or a number."""
    source, at, *values = node.inputs
    if values:
        written = to.get(values[0])
    else:
        written = ops.broadcast(_number(to, node.attrs["value"], source), ops.shape_of(to.get(at)))
    return ops.scatter_elements_update(to.get(source), to.get(at), written, to.constants.small(_along(node)))


def _topk(to: Building, node: Node) -> Any:
    largest, ordered = node.attrs.get("largest", True), node.attrs.get("sorted", True)
    built = opset15.topk(
        to.get(node.inputs[0]), to.constants.small(node.attrs["k"]), _along(node, default=-1),
        "max" if largest else "min", "value" if ordered else "none", index_element_type="i64", stable=bool(ordered),
    )  # fmt: skip
    return list(built.outputs())


def _max(to: Building, node: Node) -> Any:
    """Along a dimension: the largest value, and the index of the first of equal ones."""
    axis, small = _along(node), to.constants.small
    built = opset15.topk(
        to.get(node.inputs[0]), small(1), axis, "max", "value", index_element_type="i64", stable=True
    )  # fmt: skip
    outputs = list(built.outputs())
    return outputs if node.attrs.get("keepdim") else [ops.squeeze(o, small([axis])) for o in outputs]


def _addmm(to: Building, node: Node) -> Any:
    """For layers whose weight is [in, out]."""
    added, *factors = (to.get(v) for v in node.inputs)
    if node.attrs.get("alpha", 1) != 1 or node.attrs.get("beta", 1) != 1:
        raise CompileError(f"{node.op} with factors {node.attrs} has no OpenVINO lowering (at {node.out})")
    return ops.add(ops.matmul(*factors, False, False), added)


def _matmul(to: Building, node: Node) -> Any:
    """A matrix of the checkpoint times tokens that are columns, [N, K] · [B, K, Q]: each token's matmul with it."""
    matrix, x = node.given
    if len(matrix.shape) != 2 or token_axes(matrix.shape) or token_axes(x.shape) != (0, 2) or len(x.shape) != 3:
        raise CompileError(f"a matmul of {matrix.shape} and {x.shape} has no OpenVINO lowering (at {node.out})")
    return ops.matmul(to.get(x), to.flat_matrix(matrix), False, True)


def _position_ids(to: Building) -> Any:
    return ops.convert(to.inputs["position_ids"], ov.Type.i32)


def _positions(to: Building, node: Node) -> Any:
    """Positions plus `offset`; those of padding are limited to `last`."""
    moved = ops.add(_position_ids(to), to.constants.small(node.attrs["offset"]))
    return ops.minimum(moved, to.constants.small(node.attrs["last"]))


def _position_table(to: Building, node: Node) -> Any:
    """Rows of a table by each token's position, [T, D] or, for heads, [T, 1, D]; padding is limited to the last row."""
    table, small = node.value(0), to.constants.small
    at = ops.minimum(_position_ids(to), small(int(table.shape[0]) - 1))
    rows = ops.gather(to.get(table), at, small(0))
    return ops.reshape(rows, small([-1, *others(node.out.shape, node.out)]), False)


def _experts(to: Building, node: Node) -> Any:
    """Every expert computes every token, with shares of 0 for those not chosen: no size depends on data.

    The plugin has no operator that reads only the chosen experts and takes weights from a file.
    """
    x, ids, shares, gate_up, down = node.given
    small, (count, hidden, features) = to.constants.small, (int(d) for d in down.shape)
    into = ops.matmul(to.get(x), to.flat_matrix(gate_up), False, True)
    into = ops.reshape(into, small([-1, count, 2 * features]), False)
    gate, up = ops.variadic_split(into, small(2), small([features, features])).outputs()
    rows = ops.multiply(ops.swish(gate, small(1, np.float32)), up)
    tokens = ops.gather(ops.shape_of(to.get(ids)), small([0]), small(0))
    none = ops.broadcast(small(0, np.float32), ops.concat([tokens, small([count], np.int64)], 0))
    share = ops.scatter_elements_update(none, to.get(ids), to.get(shares), small(1))
    rows = ops.multiply(rows, ops.unsqueeze(share, small(2)))
    out = ops.reshape(to.flat_matrix(down), small([count, hidden, features]), False)
    built = ops.matmul(ops.transpose(rows, small([1, 0, 2])), out, False, True)
    return ops.reduce_sum(built, small([0]), False)


def _expert_linear(to: Building, node: Node) -> Any:
    """[T, k, N]: matmuls with every expert's matrix, of which the chosen ones' results are kept."""
    x, weight, *bias, ids = node.given
    small, turned, shape = to.constants.small, bool(node.attrs.get("transposed")), shape_of(weight)
    rows, each = to.get(x), len(x.shape) == 3
    flat = to.weights.turned(to.graph.weights[weight], shape) if turned else None
    if flat is None:
        matrix = ops.reshape(to.flat_matrix(weight), small(shape), False)
        rows = ops.transpose(rows, small([1, 0, 2])) if each else ops.unsqueeze(rows, small([0]))
        rows = ops.unsqueeze(rows, small([1]))
        built = ops.matmul(rows, matrix, False, not turned)  # [k or 1, E, T, N]
        built = ops.transpose(built, small([2, 0, 1, 3]))
    else:  # one matmul, into which the plugin fuses the decompression
        built = ops.matmul(ops.reshape(rows, small([-1, shape[1]]), False), flat, False, True)
        built = ops.reshape(built, small([-1, int(x.shape[1]) if each else 1, shape[0], shape[2]]), False)
    if bias:
        built = ops.add(built, to.get(bias[0]))
    chosen = ops.unsqueeze(to.get(ids), small([2]))
    if each:
        return ops.squeeze(ops.gather(built, chosen, small(2), batch_dims=2), small([2]))
    return ops.gather(ops.squeeze(built, small([1])), to.get(ids), small(1), batch_dims=1)


def _divided(to: Building, divisor: Any) -> Any:
    return ops.divide(to.constants.small(1, np.float32), divisor)


def _square(to: Building, node: Node) -> Any:
    return ops.multiply(to.get(node.inputs[0]), to.get(node.inputs[0]))


def _cast(to: Building, node: Node) -> Any:
    return ops.convert(to.get(node.inputs[0]), _TYPES[node.out.dtype])


def _cat(to: Building, node: Node) -> Any:
    return ops.concat([to.get(v) for v in node.inputs], _along(node))


PLAIN: Mapping[str, Emit] = {
    "add": _binary(ops.add), "sub": _binary(ops.subtract), "mul": _binary(ops.multiply), "div": _binary(ops.divide),
    "pow": _binary(ops.power), "rsub": _binary(ops.subtract, turned=True), "eq": _binary(ops.equal),
    "ne": _binary(ops.not_equal), "lt": _binary(ops.less), "le": _binary(ops.less_equal), "gt": _binary(ops.greater),
    "ge": _binary(ops.greater_equal), "maximum": _binary(ops.maximum), "minimum": _binary(ops.minimum),
    "max": _max, "min": _binary(ops.minimum), "add_": _binary(ops.add),
    "__and__": _binary(ops.logical_and), "unbind": _unbind,
    "logical_and": _binary(ops.logical_and), "bitwise_and": _binary(ops.logical_and),
    "logical_not": _unary(ops.logical_not), "bitwise_not": _unary(ops.logical_not), "neg": _unary(ops.negative),
    "abs": _unary(ops.abs), "tanh": _unary(ops.tanh), "sigmoid": _unary(ops.sigmoid), "relu": _unary(ops.relu),
    "exp": _unary(ops.exp), "log": _unary(ops.log), "sin": _unary(ops.sin), "cos": _unary(ops.cos),
    "softplus": _unary(ops.softplus), "sqrt": _unary(ops.sqrt), "square": _square,
    "reciprocal": lambda to, node: _divided(to, to.get(node.inputs[0])),
    "rsqrt": lambda to, node: _divided(to, ops.sqrt(to.get(node.inputs[0]))),
    "silu": lambda to, node: ops.swish(to.get(node.inputs[0]), to.constants.small(1, np.float32)),
    "gelu": lambda to, node: ops.gelu(to.get(node.inputs[0]), _GELU[node.attrs.get("approximate", "none")]),
    "clamp": _clamp, "clamp_min": _clamp, "clamp_max": _clamp,
    "to": _cast, "_to_copy": _cast, "type_as": _cast, "where": _where, "masked_fill": _masked_fill,
    "zeros_like": _filled(0), "ones_like": _filled(1), "full_like": _filled(None),
    "mean": _reduced(ops.reduce_mean), "sum": _reduced(ops.reduce_sum), "amax": _reduced(ops.reduce_max),
    "softmax": lambda to, node: ops.softmax(to.get(node.inputs[0]), _along(node)),
    "cumsum": lambda to, node: ops.cum_sum(to.get(node.inputs[0]), to.constants.small(_along(node))),
    "gather": lambda to, node: ops.gather_elements(*map(to.get, node.inputs), _along(node)),
    "permute": lambda to, node: _transposed(to, node.value(0), list(node.attrs["dims"]), node),
    "layer_norm": _layer_norm, "reshape": _reshape, "view": _reshape, "flatten": _reshape,
    "unflatten": _reshape, "squeeze": _reshape, "unsqueeze": _reshape, "transpose": _transpose,
    "slice": _slice, "split": _split, "split_with_sizes": _split, "chunk": _split, "cat": _cat,
    "concat": _cat, "stack": _stack,
    "expand": _expand, "repeat_interleave": _repeat_interleave, "index": _index,
    "select": lambda to, node: ops.gather(
        to.get(node.inputs[0]), to.constants.small(node.attrs["index"]), to.constants.small(_along(node))
    ),
    "scatter": _scatter, "topk": _topk, "addmm": _addmm, "matmul": _matmul, "positions": _positions,
    "position_table": _position_table, "experts": _experts, "expert_linear": _expert_linear,
}  # fmt: skip
"""Emitters by operator name in program/ir.py."""
