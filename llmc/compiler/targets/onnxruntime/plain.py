"""ATen operators that no kernel fuses, and experts, in ONNX: one function per operator, by its name in the graph.

Shapes stay symbolic: no size of batch or tokens is written into the graph. Sources: the schemas of
aten/src/ATen/native/native_functions.yaml (torch 2.13) and of ONNX operators (opset 21).

Experts are the operator MoE, which reads only the chosen experts, or llmc's own (kernels/). Other forms (gates other
than silu, biases, weights [in, out]) are two matmuls with the operators in between: llmc's ExpertLinear, or a loop over
the experts that any token chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto, helper

from llmc.compiler.program.ir import Node, Value
from llmc.compiler.targets.onnxruntime.emitter import ONNX_TYPES, OWN, Emitter
from llmc.compiler.targets.onnxruntime.formats import TABLES
from llmc.compiler.targets.onnxruntime.kernels.panels import panel_bytes, part_of
from llmc.compiler.targets.onnxruntime.options import takes_experts
from llmc.compiler.weights.recipes import Recipe
from llmc.errors import CompileError

if TYPE_CHECKING:
    from llmc.compiler.targets.onnxruntime.formats import MatrixFormat


MICROSOFT = "com.microsoft"
_INT64_MAX = 2**63 - 1


def _unary(op: str, **attrs: Any) -> Callable[[Emitter, Node], None]:
    def emit(to: Emitter, node: Node) -> None:
        to.apply(op, node, **attrs)

    return emit


def _number(to: Emitter, value: Any, like: Value | None) -> str:
    assert like is not None
    return to.const(value, np.dtype(like.dtype).type)


def _binary(op: str, turned: bool = False) -> Callable[[Emitter, Node], None]:
    """Operator on two tensors, or a tensor and a number (`other`, `exponent`); `alpha` scales the second."""

    def emit(to: Emitter, node: Node) -> None:
        operands = [to.name(v) for v in node.inputs]
        number = node.attrs.get("other", node.attrs.get("exponent"))
        if number is not None:
            operands.append(_number(to, number, node.inputs[0]))
        if node.attrs.get("alpha", 1) != 1:
            scale = _number(to, node.attrs["alpha"], node.inputs[0])
            operands[1] = to.add("Mul", [operands[1], scale], [f"{node.out.name}_scaled"])
        to.add(op, operands[::-1] if turned else operands, [node.out.name])

    return emit


def _not_equal(to: Emitter, node: Node) -> None:
    _binary("Equal")(to, Node("eq", node.inputs, [replace(node.out, name=f"{node.out.name}_equal")], node.attrs))
    to.add("Not", [f"{node.out.name}_equal"], [node.out.name])


def _clamp(to: Emitter, node: Node) -> None:
    """Bounds are numbers or tensors."""
    if len(node.inputs) > 1:
        name = to.name(node.inputs[0])
        bounded = zip(("Max", "Min"), node.inputs[1:], strict=False)
        for at, (op, bound) in enumerate(bounded):
            if bound is not None:
                name = to.add(op, [name, to.name(bound)], [f"{node.out.name}_{at}"])
        to.add("Identity", [name], [node.out.name])
        return
    bounds = [node.attrs.get(name) for name in ("min", "max")]
    names = ["" if bound is None else _number(to, bound, node.inputs[0]) for bound in bounds]
    to.add("Clip", [to.name(node.inputs[0]), *names], [node.out.name])


def _where(to: Emitter, node: Node) -> None:
    """Either side may be a number."""
    condition, *sides = node.inputs
    names = [to.name(v) for v in sides]
    for at, key in ((0, "self"), (1, "other")):
        if key in node.attrs:
            names.insert(at, _number(to, node.attrs[key], node.out))
    to.add("Where", [to.name(condition), *names], [node.out.name])


def _masked_fill(to: Emitter, node: Node) -> None:
    x, mask = node.inputs[:2]
    value = to.name(node.inputs[2]) if len(node.inputs) > 2 else _number(to, node.attrs["value"], x)
    to.add("Where", [to.name(mask), value, to.name(x)], [node.out.name])


def _filled(number: float | None) -> Callable[[Emitter, Node], None]:
    """`number`, or the operator's own, in the shape of the first input."""

    def emit(to: Emitter, node: Node) -> None:
        shape = to.add("Shape", [to.name(node.inputs[0])], [f"{node.out.name}_shape"])
        value = node.attrs["fill_value"] if number is None else number
        to.add("Expand", [_number(to, value, node.out), shape], [node.out.name])

    return emit


def _rsqrt(to: Emitter, node: Node) -> None:
    to.add("Sqrt", [to.name(node.inputs[0])], [f"{node.out.name}_root"])
    to.add("Reciprocal", [f"{node.out.name}_root"], [node.out.name])


def _reduced(op: str) -> Callable[[Emitter, Node], None]:
    def emit(to: Emitter, node: Node) -> None:
        dims = node.attrs.get("dim")
        axes = [] if dims is None else [to.const(dims if isinstance(dims, list) else [dims])]
        kept = int(node.attrs.get("keepdim", False))
        to.apply(op, node, *axes, keepdims=kept)

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


def _slice(to: Emitter, node: Node) -> None:
    start, end = node.attrs.get("start") or 0, node.attrs.get("end")
    end = _INT64_MAX if end is None else end
    if not (isinstance(start, int) and isinstance(end, int)):
        raise CompileError(f"slice from {start} to {end} has no ONNX lowering (at {node.out})")
    bounds = [to.const([n]) for n in (start, end, node.attrs.get("dim", 0), node.attrs.get("step", 1))]
    to.apply("Slice", node, *bounds)


def _transpose(to: Emitter, node: Node) -> None:
    order = list(range(len(node.value(0).shape)))
    a, b = node.attrs["dim0"], node.attrs["dim1"]
    order[a], order[b] = order[b], order[a]
    to.apply("Transpose", node, perm=order)


def _split(to: Emitter, node: Node) -> None:
    """`split`, `split_with_sizes` and `chunk`: the outputs determine the sizes."""
    axis = int(node.attrs.get("dim", 0))
    parts = [o.shape[axis] for o in node.outputs]
    if not all(isinstance(n, int) for n in parts):
        raise CompileError(f"{node.op} along a dimension of unknown size has no ONNX lowering (at {node.out})")
    to.add("Split", [to.name(node.inputs[0]), to.const(parts)], [o.name for o in node.outputs], axis=axis)


def _stack(to: Emitter, node: Node) -> None:
    axis = int(node.attrs.get("dim", 0)) % len(node.out.shape)
    names = [f"{node.out.name}_part{i}" for i in range(len(node.inputs))]
    for v, name in zip(node.inputs, names, strict=True):
        to.add("Unsqueeze", [to.name(v), to.const([axis])], [name])
    to.add("Concat", names, [node.out.name], axis=axis)


def _repeat_interleave(to: Emitter, node: Node) -> None:
    source, count = node.value(0), node.attrs.get("repeats", node.attrs.get("repeat"))
    if node.attrs.get("dim") is None or not isinstance(count, int):
        raise CompileError(f"repeat_interleave by {node.attrs} has no ONNX lowering (at {node.out})")
    axis, out = node.attrs["dim"] % len(source.shape), node.out
    to.add("Unsqueeze", [to.name(source), to.const([axis + 1])], [f"{out.name}_apart"])
    wide = to.sizes([*source.shape[: axis + 1], count, *source.shape[axis + 1 :]])
    to.add("Expand", [f"{out.name}_apart", wide], [f"{out.name}_repeated"])
    to.add("Reshape", [f"{out.name}_repeated", to.sizes(out.shape)], [out.name])


def _index(to: Emitter, node: Node) -> None:
    """x[:, …, ids]: entries of one dimension, or x[ids, ids, …], whose ids broadcast."""
    source, *ids = node.inputs
    given = [(axis, v) for axis, v in enumerate(ids) if v is not None]
    if len(given) == len(ids) > 1 and all(v.dtype == "int64" for _, v in given):
        shape = to.sizes(node.out.shape[: len(node.out.shape) - len(source.shape) + len(ids)] if source else [])
        parts = []
        for axis, v in given:
            wide = to.add("Expand", [to.name(v), shape], [f"{node.out.name}_ids{axis}"])
            parts.append(to.add("Unsqueeze", [wide, to.const([-1])], [f"{node.out.name}_column{axis}"]))
        offsets = to.add("Concat", parts, [f"{node.out.name}_places"], axis=-1)
        to.add("GatherND", [to.name(source), offsets], [node.out.name])
        return
    if len(given) != 1 or given[0][1].dtype == "bool":
        raise CompileError(f"indexing by a mask, or along several dimensions, has no ONNX lowering (at {node.out})")
    axis, at = given[0]
    to.add("Gather", [to.name(source), to.name(at)], [node.out.name], axis=axis)


def _scatter(to: Emitter, node: Node) -> None:
    """The source is a tensor or a number."""
    source, at, *values = node.given
    if values:
        written = to.name(values[0])
    else:
        shape = to.add("Shape", [to.name(at)], [f"{node.out.name}_shape"])
        value = _number(to, node.attrs["value"], source)
        written = to.add("Expand", [value, shape], [f"{node.out.name}_written"])
    inputs = [to.name(source), to.name(at), written]
    to.add("ScatterElements", inputs, [node.out.name], axis=int(node.attrs["dim"]))


def _addmm(to: Emitter, node: Node) -> None:
    """For layers whose weight is [in, out]."""
    added, *factors = (to.name(v) for v in node.inputs)
    if node.attrs.get("alpha", 1) != 1 or node.attrs.get("beta", 1) != 1:
        raise CompileError(f"{node.op} with factors {node.attrs} has no ONNX lowering (at {node.out})")
    to.add("Add", [to.add("MatMul", factors, [f"{node.out.name}_product"]), added], [node.out.name])


def _topk(to: Emitter, node: Node) -> None:
    to.add(
        "TopK", [to.name(node.inputs[0]), to.const([node.attrs["k"]])], [o.name for o in node.outputs],
        axis=int(node.attrs.get("dim", -1)), largest=int(node.attrs.get("largest", True)),
        sorted=int(node.attrs.get("sorted", True)),
    )  # fmt: skip


def _max(to: Emitter, node: Node) -> None:
    """Along a dimension, with the index of the first of equal values."""
    if "dim" not in node.attrs or len(node.outputs) != 2:
        raise CompileError(f"max of all values has no ONNX lowering (at {node.out})")
    x, dim, kept = to.name(node.inputs[0]), int(node.attrs["dim"]), int(node.attrs.get("keepdim", False))
    to.add("ReduceMax", [x, to.const([dim])], [node.outputs[0].name], keepdims=kept)
    to.add("ArgMax", [x], [node.outputs[1].name], axis=dim, keepdims=kept)


def _arange(to: Emitter, node: Node) -> None:
    if node.attrs.get("start", 0) or node.attrs.get("step", 1) != 1 or node.out.dtype != "int64":
        raise CompileError(f"arange of {node.attrs} has no ONNX lowering (at {node.out})")
    end = to.add("Squeeze", [to.sizes([node.attrs["end"]])], [f"{node.out.name}_end"])
    to.add("Range", [to.const(0), end, to.const(1)], [node.out.name])


def _constant(number: float) -> Callable[[Emitter, Node], None]:
    def emit(to: Emitter, node: Node) -> None:
        to.add("Expand", [_number(to, number, node.out), to.sizes(node.out.shape)], [node.out.name])

    return emit


def _unbind(to: Emitter, node: Node) -> None:
    axis = int(node.attrs.get("dim", 0)) % (len(node.out.shape) + 1)
    for at, out in enumerate(node.outputs):
        to.add("Gather", [to.name(node.inputs[0]), to.const(at)], [out.name], axis=axis)


def _positions(to: Emitter, node: Node) -> None:
    """Positions plus `offset`; those of padding are limited to `last`."""
    positions = to.positions()
    if node.attrs["offset"]:
        positions = to.add("Add", [positions, to.const(node.attrs["offset"])], [f"{node.out.name}_moved"])
    to.add("Min", [positions, to.const(node.attrs["last"])], [node.out.name])


def _position_table(to: Emitter, node: Node) -> None:
    """Rows of a table by position, [B, Q, D], or [B, 1, Q, D] or [B, Q, 1, D] for heads; padding has the last row."""
    table = node.value(0)
    last = int(table.shape[0]) - 1
    name = f"positions_{last}"
    if to.is_new(name):
        to.add("Min", [to.positions(), to.const(last)], [name])
    for_heads = len(node.out.shape) == 4
    out = f"{node.out.name}_rows" if for_heads else node.out.name
    to.add("Gather", [to.name(table), name], [out])
    if for_heads:
        to.add("Unsqueeze", [out, to.const([1 if node.out.shape[1] == 1 else 2])], [node.out.name])


def _cast(to: Emitter, node: Node) -> None:
    to.apply("Cast", node, to=ONNX_TYPES[node.out.dtype])


def _cat(to: Emitter, node: Node) -> None:
    to.add("Concat", [to.name(v) for v in node.inputs], [node.out.name], axis=int(node.attrs.get("dim", 0)))


PLAIN: Mapping[str, Callable[[Emitter, Node], None]] = {
    "add": _binary("Add"), "add_": _binary("Add"), "sub": _binary("Sub"), "rsub": _binary("Sub", turned=True),
    "mul": _binary("Mul"), "div": _binary("Div"), "pow": _binary("Pow"), "maximum": _binary("Max"),
    "minimum": _binary("Min"), "min": _binary("Min"), "max": _max, "matmul": _binary("MatMul"),
    "bmm": _binary("MatMul"), "addmm": _addmm, "baddbmm": _addmm,
    "eq": _binary("Equal"), "ne": _not_equal, "lt": _binary("Less"), "le": _binary("LessOrEqual"),
    "gt": _binary("Greater"), "ge": _binary("GreaterOrEqual"), "logical_and": _binary("And"),
    "bitwise_and": _binary("And"), "__and__": _binary("And"), "logical_not": _unary("Not"),
    "bitwise_not": _unary("Not"),
    "neg": _unary("Neg"), "abs": _unary("Abs"), "tanh": _unary("Tanh"), "sigmoid": _unary("Sigmoid"),
    "relu": _unary("Relu"), "exp": _unary("Exp"), "log": _unary("Log"), "sin": _unary("Sin"), "cos": _unary("Cos"),
    "softplus": _unary("Softplus"), "sqrt": _unary("Sqrt"), "reciprocal": _unary("Reciprocal"), "rsqrt": _rsqrt,
    "square": lambda to, node: to.apply("Mul", node, to.name(node.inputs[0])),
    "silu": _unary("QuickGelu", domain=MICROSOFT, alpha=1.0),
    "gelu": lambda to, node: to.apply("Gelu", node, approximate=node.attrs.get("approximate", "none")),
    "clamp": _clamp, "clamp_min": _clamp, "clamp_max": _clamp, "to": _cast, "_to_copy": _cast, "type_as": _cast,
    "where": _where, "masked_fill": _masked_fill, "zeros_like": _filled(0), "ones_like": _filled(1),
    "full_like": _filled(None), "zeros": _constant(0), "new_ones": _constant(1), "arange": _arange,
    "mean": _reduced("ReduceMean"), "sum": _reduced("ReduceSum"), "amax": _reduced("ReduceMax"),
    "softmax": lambda to, node: to.apply("Softmax", node, axis=int(node.attrs["dim"])),
    "cumsum": lambda to, node: to.apply("CumSum", node, to.const(node.attrs["dim"])),
    "layer_norm": _layer_norm, "topk": _topk, "cat": _cat, "concat": _cat, "stack": _stack, "slice": _slice,
    "split": _split, "split_with_sizes": _split, "chunk": _split, "unbind": _unbind, "transpose": _transpose,
    "permute": lambda to, node: to.apply("Transpose", node, perm=[d % len(node.out.shape) for d in node.attrs["dims"]]),
    "unsqueeze": lambda to, node: to.apply("Unsqueeze", node, to.const([node.attrs["dim"]])),
    "expand": lambda to, node: to.apply("Expand", node, to.sizes(node.out.shape)),
    "repeat_interleave": _repeat_interleave, "index": _index, "scatter": _scatter,
    "select": lambda to, node: to.apply("Gather", node, to.const(node.attrs["index"]), axis=int(node.attrs["dim"])),
    "gather": lambda to, node: to.apply("GatherElements", node, to.name(node.inputs[1]), axis=int(node.attrs["dim"])),
    "position_table": _position_table, "positions": _positions,
}  # fmt: skip
"""Emitters by operator name in program/ir.py."""


def emit_experts(to: Emitter, node: Node) -> None:
    """Emit llmc's kernel where it runs and takes the experts' features, else MoE."""
    if to.options.panels and takes_experts(int(node.value(4).shape[2])):
        _emit_own(to, node)
    else:
        _emit_moe(to, node)


def _emit_own(to: Emitter, node: Node) -> None:
    x, ids, shares, gate_up, down = node.given
    count, hidden, features = (int(d) for d in down.shape)
    names = to.graph.weights[gate_up], to.graph.weights[down]
    into, out = to.options.expert_formats(*names, hidden, features)
    panels = [_panels(to, gate_up, into, "gated"), _panels(to, down, out, "panels")]
    to.add(
        "Experts", [to.name(x), to.name(ids), to.name(shares), *panels], [node.out.name], OWN,
        experts=count, hidden=hidden, features=features, group=into.block, down_group=out.block,
        bits=into.bits, offsets=into.beside, table=TABLES.index(into.table),
    )  # fmt: skip


def _emit_own_linear(to: Emitter, node: Node) -> None:
    x, weight, *bias, ids = node.given
    turned = bool(node.attrs.get("transposed", False))
    count, rows, width = _sizes(weight, turned=turned)
    held = to.options.format([to.graph.weights[weight]], width, normed=len(x.shape) == 2)
    panels = _panels(to, weight, held, "panels", turned=turned)
    to.add(
        "ExpertLinear", [to.name(x), to.name(ids), panels, *map(to.name, bias)], [node.out.name], OWN, experts=count,
        rows=rows, width=width, group=held.block, bits=held.bits, offsets=held.beside, table=TABLES.index(held.table),
    )  # fmt: skip


def _sizes(tensor: Value, *, turned: bool) -> tuple[int, int, int]:
    """Number of experts, and rows and inputs of each one's matrix."""
    count, rows, width = (int(d) for d in tensor.shape)
    return (count, width, rows) if turned else (count, rows, width)


def _panels(to: Emitter, tensor: Value, held: MatrixFormat, part: str, *, turned: bool = False) -> str:
    source, part = to.graph.weights[tensor], part_of(part, held)
    count, rows, width = _sizes(tensor, turned=turned)
    family = f"{'turned' if turned and 'kept' not in held.family else 'each'}p{held.family}"
    recipe = Recipe(f"{source}.{family}_{part}", f"{family}_{part}", (source,), held.block, held.reordered)
    size = count * panel_bytes(rows, width, held.block, held.bits, held.offsets)
    return to.external(recipe, TensorProto.UINT8, (size,))


def _emit_moe(to: Emitter, node: Node) -> None:
    """MoE chooses by itself, by a softmax over all experts and then the k largest.

    Its input is therefore the logarithm of the model's own shares, and −∞ for experts that the model did not choose:
    the softmax is the shares over their sum, by which the result is multiplied. Source: ONNX Runtime 1.31,
    contrib_ops/cpu/moe/moe_cpu.cc; its SwiGLU is silu(gate) · up with alpha 1, beta 0 and no limit.
    """
    x, ids, shares, gate_up, down = node.given
    stem, count = node.out.name, int(gate_up.shape[0])
    to.add("Shape", [to.name(ids)], [f"{stem}_tokens"], start=0, end=1)
    to.add("Concat", [f"{stem}_tokens", to.const([count])], [f"{stem}_all"], axis=0)
    to.add("Expand", [to.const(-np.inf, np.float32), f"{stem}_all"], [f"{stem}_none"])
    to.add("Log", [to.name(shares)], [f"{stem}_logarithms"])
    to.add("ScatterElements", [f"{stem}_none", to.name(ids), f"{stem}_logarithms"], [f"{stem}_router"], axis=1)
    source = to.graph.weights[gate_up]
    recipe = Recipe(f"{source}.in_turn", "experts_in_turn", (source,))
    into = to.external(recipe, TensorProto.FLOAT, tuple(int(d) for d in gate_up.shape))
    to.add(
        "MoE", [to.name(x), f"{stem}_router", into, "", to.name(down)], [f"{stem}_mean"], "com.microsoft",
        k=int(ids.shape[1]), activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.0, activation_beta=0.0,
        normalize_routing_weights=1,
    )  # fmt: skip
    to.add("ReduceSum", [to.name(shares), to.const([1])], [f"{stem}_sum"], keepdims=1)
    to.add("Mul", [f"{stem}_mean", f"{stem}_sum"], [stem])


def emit_expert_linear(to: Emitter, node: Node) -> None:
    """Emit matmuls with each token's chosen experts (frontend/traceable.py)."""
    if to.options.panels:
        _emit_own_linear(to, node)
        return
    x, weight, *bias, ids = node.given
    out, names = node.out.name, [to.name(v) for v in bias]
    chosen, matrices = to.name(ids), to.name(weight)
    hit = to.add("Unique", [chosen], [f"{out}_hit"])
    to.add("Shape", [chosen], [f"{out}_rows"])
    to.add("Concat", [f"{out}_rows", to.const([node.out.shape[2]])], [f"{out}_shape"], axis=0)
    to.add("Expand", [to.const(0, np.float32), f"{out}_shape"], [f"{out}_none"])
    # names with a slash are internal to the loop: no outer tensor has one
    if len(x.shape) == 2:
        taken = [
            helper.make_node("Gather", ["each/places", to.const(0)], ["each/tokens"], axis=0),
            helper.make_node("Gather", [to.name(x), "each/tokens"], ["each/rows"], axis=0),
        ]
    else:
        taken = [helper.make_node("GatherND", [to.name(x), "each/places_of_rows"], ["each/rows"])]
    added = [helper.make_node("Gather", [name, "each/expert"], ["each/bias"], axis=0) for name in names]
    body = [
        helper.make_node("Identity", ["each/going"], ["each/goes_on"]),
        helper.make_node("Gather", [hit, "each/turn"], ["each/expert"], axis=0),
        helper.make_node("Equal", [chosen, "each/expert"], ["each/here"]),
        helper.make_node("NonZero", ["each/here"], ["each/places"]),
        helper.make_node("Transpose", ["each/places"], ["each/places_of_rows"], perm=[1, 0]),
        *taken,
        helper.make_node("Gather", [matrices, "each/expert"], ["each/matrix"], axis=0),
        *added,
        helper.make_node(
            "Gemm", ["each/rows", "each/matrix", *(["each/bias"] if names else [])], ["each/made"],
            transB=int(not node.attrs.get("transposed", False)),
        ),
        helper.make_node("ScatterND", ["each/held", "each/places_of_rows", "each/made"], ["each/after"]),
    ]  # fmt: skip
    infos = [
        helper.make_tensor_value_info(f"each/{name}", kind, shape)
        for name, kind, shape in (
            ("turn", TensorProto.INT64, []), ("going", TensorProto.BOOL, []), ("held", TensorProto.FLOAT, None),
            ("goes_on", TensorProto.BOOL, []), ("after", TensorProto.FLOAT, None),
        )
    ]  # fmt: skip
    to.add("Size", [hit], [f"{out}_turns"])
    graph = helper.make_graph(body, "expert", infos[:3], infos[3:])
    to.add("Loop", [f"{out}_turns", "", f"{out}_none"], [out], body=graph)
