"""ATen operators, and ours, in jax.numpy: one rule each, under the names and parameters of the operator's schema.

Each rule's meaning follows the operator's entry in torch's native_functions.yaml and the documentation of the function
of that name. Rules take JAX arrays and Python numbers; a dtype is a NumPy one, already narrowed to XLA's (64-bit
integers are 32-bit: they count tokens and positions). A rule's result is cast to the dtype that the program declares,
so rules need not follow torch's promotion exactly.

Float32 matmuls request full precision: a TPU would otherwise round their operands to bfloat16. `evaluate` runs a
program's operations over JAX arrays, each by its rule.

`Quantised` matrices are in 8 bits with a scale for each row, as formats.py describes them: y = (x · codesᵀ) · scale.
The quantized weights are cast to x's dtype, which holds them exactly, and sums are in float32. XLA reads them inside
the matmul on TPUs, and in Triton's fusions on NVIDIA GPUs; on CPU it copies the matrices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llmc.compiler.frontend import chunked
from llmc.compiler.program.sized import BoundProgram, DType, Operation, Ref
from llmc.errors import CompileError
from llmc.runtime.portable_program import DTYPES

Array = Any


class Quantised(NamedTuple):
    """A matrix as int8 or fp8 weights [.., N, K] and scale [.., N]; a tree of arrays, which a scan divides."""

    quantized: Array
    scale: Array

    def matmul(self, x: Array, precision: Any) -> Array:
        """[…, K] × [N, K] → […, N] in x's dtype."""
        out = lax.dot_general(
            x, self.quantized.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())), precision=precision,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return (out * self.scale).astype(x.dtype)

    def rows(self, indices: Array) -> Array:
        quantized, scale = (jnp.take(part, indices, axis=0, mode="clip") for part in self)
        return quantized.astype(jnp.float32) * scale[..., None]


Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
"""Rules by "name.overload"."""

_INT64_MAX = 2**63 - 1


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def _precision(x: Array) -> Any:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


# matmuls


@_rule("linear.default")
def _linear(input: Array, weight: Array, bias: Array | None = None) -> Array:  # noqa: A002 - ATen's name
    """[…, in] × [out, in] → […, out]."""
    if isinstance(weight, Quantised):
        out = weight.matmul(input, _precision(input))
    else:
        out = lax.dot_general(
            input, weight, (((input.ndim - 1,), (1,)), ((), ())), precision=_precision(input),
            preferred_element_type=input.dtype,
        )  # fmt: skip
    return out if bias is None else out + bias


@_rule("matmul.default", "bmm.default", "mm.default")
def _matmul(self: Array, other: Array | None = None, mat2: Array | None = None) -> Array:
    return jnp.matmul(self, mat2 if other is None else other, precision=_precision(self))


@_rule("addmm.default")
def _addmm(self: Array, mat1: Array, mat2: Array, beta: float = 1, alpha: float = 1) -> Array:
    matmul = jnp.matmul(mat1, mat2, precision=_precision(mat1))
    return (self if beta == 1 else beta * self) + (matmul if alpha == 1 else alpha * matmul)


# arithmetic, comparison and choice

_UNARY: dict[str, Rule] = {
    "neg": operator.neg, "rsqrt": lax.rsqrt, "cos": jnp.cos, "sin": jnp.sin, "tanh": jnp.tanh, "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid, "bitwise_not": operator.invert, "abs": jnp.abs, "reciprocal": jnp.reciprocal,
    "floor": jnp.floor, "log": jnp.log, "relu": jax.nn.relu, "exp": jnp.exp, "exp2": jnp.exp2, "square": jnp.square,
    "squeeze": jnp.squeeze,
}  # fmt: skip
_BINARY: dict[str, Rule] = {
    "mul": operator.mul, "div": operator.truediv, "le": operator.le, "lt": operator.lt, "gt": operator.gt,
    "ge": operator.ge, "eq": operator.eq, "ne": operator.ne, "remainder": jnp.remainder,
}  # fmt: skip


def _unary(apply: Rule) -> Rule:
    def rule(self: Array) -> Array:  # arguments are passed by name
        return apply(self)

    return rule


def _binary(apply: Rule) -> Rule:
    def rule(self: Array, other: Any) -> Array:
        return apply(self, other)

    return rule


RULES.update({f"{name}.default": _unary(apply) for name, apply in _UNARY.items()})
RULES.update({f"{name}.{kind}": _binary(apply) for name, apply in _BINARY.items() for kind in ("Tensor", "Scalar")})
_rule("__and__.Tensor", "bitwise_and.Tensor", "logical_and.default")(_binary(operator.and_))
_rule("minimum.default", "min.other")(_binary(jnp.minimum))


@_rule("add.Tensor", "add.Scalar")
def _add(self: Array, other: Any, alpha: float = 1) -> Array:
    return self + (other if alpha == 1 else alpha * other)


@_rule("sub.Tensor", "sub.Scalar")
def _sub(self: Array, other: Any, alpha: float = 1) -> Array:
    return self - (other if alpha == 1 else alpha * other)


@_rule("pow.Tensor_Scalar")
def _pow(self: Array, exponent: float) -> Array:
    return lax.integer_pow(self, int(exponent)) if float(exponent).is_integer() else self**exponent


@_rule("pow.Scalar")
def _power_of(self: float, exponent: Array) -> Array:
    return jnp.power(self, exponent)


@_rule("clamp.default", "clamp.Tensor")
def _clamp(self: Array, min: Any = None, max: Any = None) -> Array:  # noqa: A002 - ATen's names
    return jnp.clip(self, min, max)


@_rule("gelu.default")
def _gelu(self: Array, approximate: str = "none") -> Array:
    return jax.nn.gelu(self, approximate=approximate == "tanh")


@_rule("softplus.default")
def _softplus(self: Array, beta: float = 1, threshold: float = 20) -> Array:
    """log(1 + exp(beta · x)) / beta, and x itself where beta · x is above the threshold."""
    scaled = self * beta
    return jnp.where(scaled > threshold, self, jax.nn.softplus(scaled) / beta)


@_rule("softmax.int")
def _softmax(self: Array, dim: int, dtype: Any = None) -> Array:
    return jax.nn.softmax(self if dtype is None else self.astype(dtype), axis=dim)


def _reduced(apply: Rule) -> Rule:
    def rule(self: Array, dim: Sequence[int] | None, keepdim: bool = False, dtype: Any = None) -> Array:
        return apply(self, axis=None if dim is None else tuple(dim), dtype=dtype, keepdims=keepdim)

    return rule


RULES |= {"mean.dim": _reduced(jnp.mean), "sum.dim_IntList": _reduced(jnp.sum)}


@_rule("cumsum.default")
def _cumsum(self: Array, dim: int, dtype: Any = None) -> Array:
    return jnp.cumsum(self, axis=dim, dtype=dtype)


@_rule("layer_norm.default")
def _layer_norm(
    input: Array, normalized_shape: Sequence[int], weight: Array | None = None, bias: Array | None = None,  # noqa: A002 - ATen's name
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Array:  # fmt: skip
    """Over the last axes, in float32: less the mean, over the root of the variance (of all values) and `eps`."""
    del cudnn_enable
    axes = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    wide = input.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=axes, keepdims=True)
    out = centred * lax.rsqrt(jnp.mean(centred * centred, axis=axes, keepdims=True) + eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


@_rule("scaled_dot_product_attention.default")
def _attention(
    query: Array, key: Array, value: Array, attn_mask: Array | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Array:  # fmt: skip
    """[B, H, Q, D] over keys and values [B, Hkv, S, D]: scores and their exponentials in float32; a query that may see
    no key gives 0.
    """
    if dropout_p:
        raise NotImplementedError("attention that drops out")
    if enable_gqa:
        key, value = (jnp.repeat(kv, query.shape[-3] // kv.shape[-3], axis=-3) for kv in (key, value))
    precision, root = _precision(query), query.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum(
        "...qd,...sd->...qs", query, key, precision=precision, preferred_element_type=jnp.float32
    ) * root  # fmt: skip
    if is_causal:
        attn_mask = jnp.tri(query.shape[-2], key.shape[-2], dtype=bool)
    if attn_mask is not None and attn_mask.dtype == bool:
        scores = jnp.where(attn_mask, scores, -jnp.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.astype(jnp.float32)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(largest), largest, 0))
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return jnp.matmul(weights.astype(value.dtype), value, precision=precision)


@_rule("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(condition: Array, self: Any, other: Any) -> Array:
    return jnp.where(condition, self, other)


@_rule("topk.default")
def _topk(self: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Array, Array]:  # noqa: A002 - ATen's name
    """The k largest of the last axis, descending; of equal values the lower index first."""
    if not largest or dim not in (-1, self.ndim - 1):
        raise NotImplementedError("only the largest values of the last axis")
    values, ids = lax.top_k(self, k)
    return values, ids


@_rule("max.dim")
def _max(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """The index is of the first of equal values. Uses only reductions of one tensor, which every compiler supports."""
    top = jnp.max(self, dim, keepdims=True)
    offsets = lax.broadcasted_iota(jnp.int32, self.shape, dim % self.ndim)
    first = jnp.min(jnp.where(self == top, offsets, self.shape[dim] - 1), dim, keepdims=keepdim)
    return jnp.max(self, dim, keepdims=keepdim), first


@_rule("masked_fill.Scalar")
def _masked_fill(self: Array, mask: Array, value: float) -> Array:
    return jnp.where(mask, jnp.asarray(value, self.dtype), self)


@_rule("scatter.value")
def _scatter(self: Array, dim: int, index: Array, value: float) -> Array:
    """By comparison, which every compiler supports; along other axes the index is as long as `self`."""
    offsets = jnp.arange(self.shape[dim])
    hit = jnp.moveaxis((jnp.moveaxis(index, dim, -1)[..., None] == offsets).any(-2), -1, dim)
    return jnp.where(hit, jnp.asarray(value, self.dtype), self)


# shapes


@_rule("view.default", "reshape.default")
def _reshape(self: Array, size: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Array:
    return self.reshape(tuple(size or () if shape is None else shape))


@_rule("transpose.int")
def _transpose(self: Array, dim0: int, dim1: int) -> Array:
    return jnp.swapaxes(self, dim0, dim1)


@_rule("permute.default")
def _permute(self: Array, dims: Sequence[int]) -> Array:
    return jnp.transpose(self, tuple(dims))


@_rule("unsqueeze.default")
def _unsqueeze(self: Array, dim: int) -> Array:
    return jnp.expand_dims(self, dim)


@_rule("squeeze.dim")
def _squeeze(self: Array, dim: int) -> Array:
    return jnp.squeeze(self, dim) if self.shape[dim] == 1 else self


@_rule("expand.default")
def _expand(self: Array, size: Sequence[int], implicit: bool = False) -> Array:
    del implicit
    missing = len(size) - self.ndim
    return jnp.broadcast_to(self, tuple(self.shape[i - missing] if n == -1 else n for i, n in enumerate(size)))


@_rule("repeat.default")
def _repeat(self: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(self, tuple(repeats))


@_rule("slice.Tensor")
def _slice(self: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    end = None if end is None or end == _INT64_MAX else end
    return self[(slice(None),) * (dim % self.ndim) + (slice(start, end, step),)]


@_rule("narrow.default")
def _narrow(self: Array, dim: int, start: int, length: int) -> Array:
    return lax.slice_in_dim(self, start, start + length, axis=dim % self.ndim)


@_rule("select.int")
def _select(self: Array, dim: int, index: int) -> Array:
    return lax.index_in_dim(self, index, dim, keepdims=False)


@_rule("cat.default", "concat.default")
def _cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    return jnp.concatenate(tensors, dim)


@_rule("stack.default")
def _stack(tensors: Sequence[Array], dim: int = 0) -> Array:
    return jnp.stack(tensors, dim)


@_rule("flatten.using_ints")
def _flatten(self: Array, start_dim: int = 0, end_dim: int = -1) -> Array:
    start, end = start_dim % self.ndim, end_dim % self.ndim
    return self.reshape(*self.shape[:start], -1, *self.shape[end + 1 :])


@_rule("unbind.int")
def _unbind(self: Array, dim: int = 0) -> list[Array]:
    return list(jnp.moveaxis(self, dim, 0))


@_rule("repeat_interleave.self_int")
def _repeat_interleave(self: Array, repeats: int, dim: int | None = None, output_size: int | None = None) -> Array:
    del output_size
    return jnp.repeat(self, repeats, axis=dim)


@_rule("split.Tensor", "split_with_sizes.default")
def _split(
    self: Array, split_size: int | None = None, split_sizes: Sequence[int] | None = None, dim: int = 0
) -> list[Array]:
    if split_sizes is None:
        assert split_size is not None
        bounds = list(range(split_size, self.shape[dim], split_size))
    else:
        bounds = [sum(split_sizes[: i + 1]) for i in range(len(split_sizes) - 1)]
    parts: list[Array] = jnp.split(self, bounds, dim)
    return parts


@_rule("chunk.default")
def _chunk(self: Array, chunks: int, dim: int = 0) -> list[Array]:
    parts: list[Array] = _split(self, split_size=-(-self.shape[dim] // chunks), dim=dim)
    return parts


# look-ups


@_rule("embedding.default")
def _embedding(
    weight: Array, indices: Array, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Array:
    del padding_idx, scale_grad_by_freq, sparse
    if isinstance(weight, Quantised):
        return weight.rows(indices)
    return jnp.take(weight, indices, axis=0, mode="clip")


@_rule("gather.default")
def _gather(self: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    del sparse_grad
    read = tuple(slice(None if axis == dim % self.ndim else size) for axis, size in enumerate(index.shape))
    return jnp.take_along_axis(self[read], index, axis=dim, mode="clip")


@_rule("index.Tensor")
def _index(self: Array, indices: Sequence[Array | None]) -> Array:
    return self[tuple(slice(None) if i is None else i for i in indices)]


# attention over the slot cache


@_rule("llmc.attend.default")
def _attend(**given: Any) -> Array:
    from llmc.compiler.targets.xla.attention import attend

    return attend(**given)


# layers with recurrent state


def _with_state(written: Rule) -> Rule:
    """An operator of frontend/recurrent.py, in float32 throughout; `evaluate` casts its results."""

    def rule(**given: Any) -> tuple[Array, Array]:
        wide = {
            name: value.astype(jnp.float32) if hasattr(value, "dtype") and value.dtype == jnp.bfloat16 else value
            for name, value in given.items()
        }
        with jax.default_matmul_precision("highest"):
            built: tuple[Array, Array] = written(jnp, **wide)
        return built

    return rule


RULES["llmc.causal_conv.default"] = _with_state(partial(chunked.causal_conv, bias=None))
RULES["llmc.gated_delta.default"] = _with_state(chunked.gated_delta)
RULES["llmc.state_scan.default"] = _with_state(chunked.state_scan)


# creating tensors, and dtype conversions


@_rule("arange.default")
def _arange(end: int, dtype: Any = None, **_: Any) -> Array:
    return jnp.arange(end, dtype=dtype)


@_rule("arange.start_step")
def _arange_between(start: int, end: int, step: int = 1, dtype: Any = None, **_: Any) -> Array:
    return jnp.arange(start, end, step, dtype=dtype)


@_rule("zeros.default")
def _zeros(size: Sequence[int], dtype: Any = None, **_: Any) -> Array:
    return jnp.zeros(tuple(size), dtype)


@_rule("zeros_like.default")
def _zeros_like(self: Array, dtype: Any = None, **_: Any) -> Array:
    return jnp.zeros_like(self, dtype)


@_rule("full.default")
def _full(size: Sequence[int], fill_value: float, dtype: Any = None, **_: Any) -> Array:
    return jnp.full(tuple(size), fill_value, dtype)


@_rule("full_like.default")
def _full_like(self: Array, fill_value: float, dtype: Any = None, **_: Any) -> Array:
    return jnp.full(self.shape, fill_value, self.dtype if dtype is None else dtype)


@_rule("new_zeros.default")
def _new_zeros(self: Array, size: Sequence[int], dtype: Any = None, **_: Any) -> Array:
    return jnp.zeros(tuple(size), self.dtype if dtype is None else dtype)


@_rule("new_ones.default")
def _new_ones(self: Array, size: Sequence[int], dtype: Any = None, **_: Any) -> Array:
    return jnp.ones(tuple(size), self.dtype if dtype is None else dtype)


@_rule("to.dtype", "to.device", "to.dtype_layout", "_to_copy.default")
def _to(self: Array, dtype: Any = None, **_: Any) -> Array:
    return self if dtype is None else self.astype(dtype)


@_rule("type_as.default")
def _type_as(self: Array, other: Array) -> Array:
    return self.astype(other.dtype)


@_rule("contiguous.default", "clone.default", "detach.default", "alias.default", "dropout.default")
def _same(self: Array | None = None, input: Array | None = None, **_: Any) -> Array:  # noqa: A002 - ATen's name
    return input if self is None else self


_NARROW = {"int64": "int32", "float64": "float32"}


def narrowed(code: int) -> np.dtype[Any]:
    """Return XLA's dtype for torch's dtype number `code`: 64-bit numbers are 32-bit."""
    name = DTYPES[code]
    return jnp.dtype(_NARROW.get(name, name))


def evaluate(program: BoundProgram, operations: Iterable[Operation], values: dict[str, Array]) -> dict[str, Array]:
    """Run `operations` over `values` (arrays by name), add their results to it, and return it.

    Raises CompileError naming an operator that has no rule, or that fails, and the layer it came from.
    """
    last = ""
    for operation in operations:
        last = next((program.weights[r] for r in operation.refs() if r in program.weights), last)
        rule = RULES.get(operation.operator)
        if rule is None:
            raise CompileError(
                f"operator aten.{operation.operator} ({_position(last)}) has no rule for XLA; targets/xla/"
                f"operators.py has those of {len(RULES)} operators: add one there"
            )
        try:
            result = rule(**{name: _given(v, values) for name, v in operation.arguments.items()})
        except Exception as e:
            raise CompileError(
                f"operator aten.{operation.operator} ({_position(last)}) cannot be lowered to XLA: {e}"
            ) from e
        for name, value in zip(operation.outputs, result if operation.several else [result], strict=True):
            values[name] = value.astype(narrowed(program.dtypes[name]))
    return values


def _position(weight: str) -> str:
    return f"after {weight}" if weight else "before the first layer"


def _given(argument: Any, values: Mapping[str, Array]) -> Any:
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, DType):
        return narrowed(argument.code)
    if isinstance(argument, list):
        return [_given(a, values) for a in argument]
    return argument
