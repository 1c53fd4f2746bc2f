"""ATen operators in OpenVINO's: one rule each, under the names and parameters of ATen's own schema.

Source of each rule's meaning: the operator's entry in torch's native_functions.yaml and the documentation of the
function of that name. A rule takes the maker of constants, then outputs of nodes (of known shape), Python numbers, or
lists of them; a dtype is an ov.Type, already narrowed (64-bit integers are 32-bit: they count tokens and positions).
What a rule returns is converted to the type that the program declares, so rules need not follow torch's promotion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino import opset15

from llmc.compiler.targets.openvino.constants import Constants

Output = Any
Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
"""From "name.overload" to its rule."""


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def shape_of(x: Output) -> list[int]:
    """The sizes of an output, all of which are numbers here."""
    return list(_out(x).get_shape())


def element_type(x: Output) -> ov.Type:
    """The type of an output's numbers."""
    return _out(x).get_element_type()


def _out(x: Any) -> Output:
    return x.output(0) if hasattr(x, "get_output_size") else x


def _axis(x: Output, dim: int) -> int:
    return dim % max(1, len(shape_of(x)))


def _scalar(c: Constants, value: Any, like: Output) -> Output:
    return c.small(value, np.float32 if element_type(like).is_real() else np.int32)


def _pair(c: Constants, a: Any, b: Any) -> tuple[Output, Output]:
    """Two operands of one type: a number takes the tensor's, and an integer tensor that of a real one."""
    if isinstance(a, int | float):
        return _scalar(c, a, b), b
    if isinstance(b, int | float):
        return a, _scalar(c, b, a)
    types = [element_type(x) for x in (a, b)]
    if types[0] == types[1]:
        return a, b
    wanted = next((t for t in types if t.is_real()), types[0])
    return ops.convert(a, wanted), ops.convert(b, wanted)


def _binary(make: Callable[..., Any]) -> Rule:
    def rule(c: Constants, self: Output, other: Any, alpha: float = 1) -> Output:
        a, b = _pair(c, self, other)
        return make(a, b if alpha == 1 else ops.multiply(b, _scalar(c, alpha, b)))

    return rule


for _names, _make in (
    ("add", ops.add), ("sub", ops.subtract), ("mul", ops.multiply), ("div", ops.divide), ("le", ops.less_equal),
    ("lt", ops.less), ("gt", ops.greater), ("ge", ops.greater_equal), ("eq", ops.equal),
):  # fmt: skip
    RULES.update(dict.fromkeys((f"{_names}.Tensor", f"{_names}.Scalar"), _binary(_make)))
RULES.update(dict.fromkeys(("__and__.Tensor", "bitwise_and.Tensor", "logical_and.default"), _binary(ops.logical_and)))


def _unary(make: Callable[..., Any]) -> Rule:
    def rule(c: Constants, self: Output) -> Output:
        return make(self)

    return rule


for _names, _make in (("cos", ops.cos), ("sin", ops.sin), ("tanh", ops.tanh), ("sigmoid", ops.sigmoid)):
    RULES[f"{_names}.default"] = _unary(_make)


@_rule("neg.default")
def _neg(c: Constants, self: Output) -> Output:
    return ops.multiply(self, _scalar(c, -1, self))  # what plugins look for in rotary embedding


@_rule("rsqrt.default")
def _rsqrt(c: Constants, self: Output) -> Output:
    return ops.divide(c.small(1, np.float32), ops.sqrt(self))  # what plugins look for in a norm


@_rule("silu.default")
def _silu(c: Constants, self: Output) -> Output:
    return ops.swish(self, c.small(1, np.float32))


@_rule("gelu.default")
def _gelu(c: Constants, self: Output, approximate: str = "none") -> Output:
    return ops.gelu(self, "TANH" if approximate == "tanh" else "ERF")


@_rule("pow.Tensor_Scalar")
def _pow(c: Constants, self: Output, exponent: float) -> Output:
    return ops.power(self, _scalar(c, exponent, self))


@_rule("linear.default")
def _linear(c: Constants, input: Output, weight: Output, bias: Output | None = None) -> Output:  # noqa: A002 - ATen's name
    """[…, in] × [out, in] → […, out]."""
    out = ops.matmul(input, weight, False, True)
    return out if bias is None else ops.add(out, bias)


@_rule("matmul.default", "bmm.default", "mm.default")
def _matmul(c: Constants, self: Output, other: Output | None = None, mat2: Output | None = None) -> Output:
    return ops.matmul(self, mat2 if other is None else other, False, False)


@_rule("softmax.int")
def _softmax(c: Constants, self: Output, dim: int, dtype: ov.Type | None = None) -> Output:
    return ops.softmax(self if dtype is None else ops.convert(self, dtype), _axis(self, dim))


@_rule("mean.dim")
def _mean(
    c: Constants, self: Output, dim: Sequence[int] | None, keepdim: bool = False, dtype: ov.Type | None = None
) -> Output:
    axes = list(range(len(shape_of(self)))) if dim is None else list(dim)
    return ops.reduce_mean(self if dtype is None else ops.convert(self, dtype), c.small(axes), keepdim)


@_rule("layer_norm.default")
def _layer_norm(
    c: Constants, input: Output, normalized_shape: Sequence[int], weight: Output | None = None,  # noqa: A002 - ATen's name
    bias: Output | None = None, eps: float = 1e-5, cudnn_enable: bool = True,
) -> Output:  # fmt: skip
    axes = c.small(list(range(-len(normalized_shape), 0)))
    out = ops.mvn(input, axes, True, eps, "inside_sqrt")
    out = out if weight is None else ops.multiply(out, weight)
    return out if bias is None else ops.add(out, bias)


@_rule("repeat_interleave.self_int")
def _repeat_interleave(c: Constants, self: Output, repeats: int, dim: int) -> Output:
    held, axis = shape_of(self), _axis(self, dim)
    spread = _expand(c, ops.unsqueeze(self, c.small([axis + 1])), [*held[: axis + 1], repeats, *held[axis + 1 :]])
    return ops.reshape(spread, c.small([*held[:axis], held[axis] * repeats, *held[axis + 1 :]]), False)


@_rule("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(c: Constants, condition: Output, self: Any, other: Any) -> Output:
    if isinstance(self, int | float) and isinstance(other, int | float):
        self = c.small(self, np.float32)
    return ops.select(condition, *_pair(c, self, other))


@_rule("topk.default")
def _topk(c: Constants, self: Output, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[Output]:  # noqa: A002 - ATen's name
    """The k largest, descending; of equal values the lower index first."""
    mode = "max" if largest else "min"
    made = opset15.topk(self, c.small(k), _axis(self, dim), mode, "value", index_element_type="i32", stable=True)
    return list(made.outputs())


@_rule("view.default", "reshape.default")
def _reshape(c: Constants, self: Output, size: Sequence[int] = (), shape: Sequence[int] | None = None) -> Output:
    return ops.reshape(self, c.small(list(size if shape is None else shape)), False)


@_rule("transpose.int")
def _transpose(c: Constants, self: Output, dim0: int, dim1: int) -> Output:
    order = list(range(len(shape_of(self))))
    a, b = _axis(self, dim0), _axis(self, dim1)
    order[a], order[b] = order[b], order[a]
    return ops.transpose(self, c.small(order))


@_rule("permute.default")
def _permute(c: Constants, self: Output, dims: Sequence[int]) -> Output:
    return ops.transpose(self, c.small([_axis(self, d) for d in dims]))


@_rule("unsqueeze.default")
def _unsqueeze(c: Constants, self: Output, dim: int) -> Output:
    return ops.unsqueeze(self, c.small([dim]))


@_rule("squeeze.dim")
def _squeeze(c: Constants, self: Output, dim: int) -> Output:
    return ops.squeeze(self, c.small([dim])) if shape_of(self)[dim] == 1 else self


@_rule("expand.default")
def _expand(c: Constants, self: Output, size: Sequence[int], implicit: bool = False) -> Output:
    held = shape_of(self)
    missing = len(size) - len(held)
    wanted = [held[i - missing] if n == -1 else n for i, n in enumerate(size)]
    return self if wanted == held else ops.broadcast(self, c.small(wanted))


@_rule("slice.Tensor")
def _slice(
    c: Constants, self: Output, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Output:
    size = shape_of(self)[dim]
    first, last, _ = slice(start, end, step).indices(size)
    if (first, last, step) == (0, size, 1):
        return self
    return ops.slice(self, *(c.small([n]) for n in (first, last, step, _axis(self, dim))))


@_rule("select.int")
def _select(c: Constants, self: Output, dim: int, index: int) -> Output:
    return ops.gather(self, c.small(index % shape_of(self)[dim]), c.small(_axis(self, dim)))


@_rule("cat.default")
def _cat(c: Constants, tensors: Sequence[Output], dim: int = 0) -> Output:
    return ops.concat([_out(t) for t in tensors], _axis(tensors[0], dim))


@_rule("split.Tensor", "split_with_sizes.default")
def _split(
    c: Constants, self: Output, split_size: int | None = None, split_sizes: Sequence[int] | None = None, dim: int = 0
) -> list[Output]:
    total = shape_of(self)[dim]
    sizes = list(split_sizes or ())
    if split_size is not None:
        sizes = [min(split_size, total - at) for at in range(0, total, split_size)]
    return list(ops.variadic_split(self, c.small(_axis(self, dim)), c.small(sizes)).outputs())


@_rule("chunk.default")
def _chunk(c: Constants, self: Output, chunks: int, dim: int = 0) -> list[Output]:
    parts: list[Output] = _split(c, self, split_size=-(-shape_of(self)[dim] // chunks), dim=dim)
    return parts


@_rule("embedding.default")
def _embedding(
    c: Constants, weight: Output, indices: Output, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Output:  # fmt: skip
    return ops.gather(weight, indices, c.small(0))


@_rule("index.Tensor")
def _index(c: Constants, self: Output, indices: Sequence[Output | None]) -> Output:
    """Integer tensors for the first axes, all of one shape once they are broadcast."""
    if any(i is None for i in indices):
        raise NotImplementedError("an index that leaves an axis before others as it is")
    wanted = list(np.broadcast_shapes(*(shape_of(i) for i in indices)))
    whole = [ops.unsqueeze(_expand(c, i, wanted), c.small([-1])) for i in indices]
    return ops.gather_nd(self, ops.concat([_out(i) for i in whole], -1), 0)


@_rule("arange.default")
def _arange(c: Constants, end: int, dtype: ov.Type | None = None, **_: Any) -> Output:
    return c.table(f"tokens_{end}", np.arange(end, dtype=np.int32))


@_rule("full.default")
def _full(c: Constants, size: Sequence[int], fill_value: float, dtype: ov.Type | None = None, **_: Any) -> Output:
    return _expand(c, c.small(fill_value, np.int32 if dtype is not None and not dtype.is_real() else np.float32), size)


@_rule("zeros.default")
def _zeros(c: Constants, size: Sequence[int], dtype: ov.Type | None = None, **_: Any) -> Output:
    return _full(c, size, 0, dtype)


@_rule("new_ones.default")
def _new_ones(c: Constants, self: Output, size: Sequence[int], dtype: ov.Type | None = None, **_: Any) -> Output:
    return _full(c, size, 1, element_type(self) if dtype is None else dtype)


@_rule("to.dtype", "to.device", "to.dtype_layout", "_to_copy.default")
def _to(c: Constants, self: Output, dtype: ov.Type | None = None, **_: Any) -> Output:
    return self if dtype is None or element_type(self) == dtype else ops.convert(self, dtype)


@_rule("contiguous.default", "clone.default", "detach.default", "alias.default", "dropout.default")
def _same(c: Constants, self: Output | None = None, input: Output | None = None, **_: Any) -> Output:  # noqa: A002 - ATen's name
    return input if self is None else self
