"""Every rule for an ATen operator gives what torch gives, and every rule is tried."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.compiler.frontend.test_recurrent import CASES as STATEFUL
from tests.tiers import default_cases

_RANDOM = np.random.default_rng(3)
X = _RANDOM.standard_normal((2, 3, 4)).astype(np.float32)
Y = _RANDOM.standard_normal((2, 3, 4)).astype(np.float32)
POSITIVE = np.abs(X) + 0.5
W = _RANDOM.standard_normal((5, 4)).astype(np.float32)
IDS = np.array([[0, 4, 2], [3, 3, 1]], np.int32)
MASK = X > 0
QUERY, KEY, VALUE = (_RANDOM.standard_normal((2, 4, n, 8)).astype(np.float32) for n in (3, 5, 5))
SEEN = _RANDOM.random((2, 1, 3, 5)) > 0.4
SEEN[1, 0, 2] = False  # a query that may see no key

CASES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("linear.default", (X, W), {}),
    ("linear.default", (X, W, W[:, 0].copy()), {}),
    ("matmul.default", (X, Y.swapaxes(1, 2).copy()), {}),
    ("bmm.default", (X, Y.swapaxes(1, 2).copy()), {}),
    ("mm.default", (X[0], W.T.copy()), {}),
    ("addmm.default", (W[:, 0].copy(), X[0], W.T.copy()), {}),
    ("addmm.default", (W[:, 0].copy(), X[0], W.T.copy()), {"beta": 2, "alpha": 0.5}),
    ("scaled_dot_product_attention.default", (QUERY, KEY, VALUE), {}),
    ("scaled_dot_product_attention.default", (QUERY, KEY, VALUE, SEEN), {"scale": 0.25}),
    ("scaled_dot_product_attention.default", (QUERY, KEY, VALUE, np.where(SEEN, 0.5, -1e9).astype(np.float32)), {}),
    ("scaled_dot_product_attention.default", (KEY, KEY, VALUE), {"is_causal": True}),
    ("scaled_dot_product_attention.default", (QUERY, KEY[:, :2].copy(), VALUE[:, :2].copy()), {"enable_gqa": True}),
    ("add.Tensor", (X, Y), {}),
    ("add.Tensor", (X, Y), {"alpha": 3}),
    ("add.Scalar", (X, 2.5), {}),
    ("sub.Tensor", (X, Y), {"alpha": 2}),
    ("sub.Scalar", (X, 2), {}),
    ("mul.Tensor", (X, Y), {}),
    ("mul.Scalar", (X, -2), {}),
    ("div.Tensor", (X, POSITIVE), {}),
    ("div.Scalar", (X, 4), {}),
    ("pow.Tensor_Scalar", (X, 2), {}),
    ("pow.Tensor_Scalar", (POSITIVE, 0.5), {}),
    ("neg.default", (X,), {}),
    ("floor.default", (X,), {}),
    ("remainder.Scalar", (X, -0.7), {}),
    ("remainder.Tensor", (X, Y), {}),
    ("log.default", (POSITIVE,), {}),
    ("rsqrt.default", (POSITIVE,), {}),
    ("cos.default", (X,), {}),
    ("sin.default", (X,), {}),
    ("tanh.default", (X,), {}),
    ("silu.default", (X,), {}),
    ("sigmoid.default", (X,), {}),
    ("clamp.default", (X, -0.5, 0.25), {}),
    ("clamp.default", (X, -0.5), {}),
    ("clamp.Tensor", (X, Y), {}),
    ("clamp.Tensor", (X, None, Y), {}),
    ("pow.Scalar", (10000.0, X), {}),
    ("minimum.default", (X, Y), {}),
    ("min.other", (X, Y), {}),
    ("cumsum.default", (X, 1), {}),
    ("cumsum.default", (IDS, -1), {"dtype": torch.int32}),
    ("unbind.int", (X, -1), {}),
    ("full_like.default", (X, 2.5), {}),
    ("full_like.default", (X, 3), {"dtype": torch.int32}),
    ("abs.default", (X,), {}),
    ("reciprocal.default", (POSITIVE,), {}),
    ("bitwise_not.default", (MASK,), {}),
    ("max.dim", (X, -1), {}),
    ("max.dim", (X, 1, True), {}),
    ("masked_fill.Scalar", (X, MASK, float("-inf")), {}),
    ("scatter.value", (X[0], 1, np.array([[3], [0], [1]]), 2.5), {}),
    ("squeeze.default", (X[:1, :, :1],), {}),
    ("zeros_like.default", (X,), {}),
    ("arange.start_step", (2, 12, 3), {"dtype": torch.int32}),
    ("relu.default", (X,), {}),
    ("exp.default", (X,), {}),
    ("exp2.default", (X,), {}),
    ("square.default", (X,), {}),
    ("sum.dim_IntList", (X, [-1], True), {}),
    ("sum.dim_IntList", (X, [0, 2]), {}),
    ("softplus.default", (X * 20,), {}),
    ("softplus.default", (X,), {"beta": 2.0, "threshold": 1.0}),
    ("gelu.default", (X,), {}),
    ("gelu.default", (X,), {"approximate": "tanh"}),
    ("layer_norm.default", (X, [4]), {}),
    ("layer_norm.default", (X, [3, 4], Y[0], X[0]), {"eps": 0.25}),
    ("softmax.int", (X, -1), {}),
    ("softmax.int", (X, 1), {}),
    ("mean.dim", (X, [-1], True), {}),
    ("mean.dim", (X, [0, 2]), {}),
    *((f"{name}.Tensor", (X, Y), {}) for name in ("le", "lt", "gt", "ge", "eq", "ne")),
    *((f"{name}.Scalar", (X, 0.25), {}) for name in ("le", "lt", "gt", "ge", "eq", "ne")),
    ("__and__.Tensor", (MASK, Y > 0), {}),
    ("bitwise_and.Tensor", (MASK, Y > 0), {}),
    ("logical_and.default", (MASK, Y > 0), {}),
    ("where.self", (MASK, X, Y), {}),
    ("where.ScalarOther", (MASK, X, 0.0), {}),
    ("where.ScalarSelf", (MASK, 1.0, Y), {}),
    ("where.Scalar", (MASK, 1.0, 0.0), {}),
    ("topk.default", (X, 2), {}),
    ("view.default", (X, [2, 12]), {}),
    ("view.default", (X, [-1, 4]), {}),
    ("reshape.default", (X, [4, 6]), {}),
    ("transpose.int", (X, 1, -1), {}),
    ("permute.default", (X, [2, 0, 1]), {}),
    ("unsqueeze.default", (X, -1), {}),
    ("squeeze.dim", (X[:, :1], 1), {}),
    ("squeeze.dim", (X, 1), {}),
    ("expand.default", (X[:, :1], [-1, 3, 4]), {}),
    ("expand.default", (X[0], [2, 3, 4]), {}),
    ("repeat.default", (X, [2, 1, 3]), {}),
    ("repeat.default", (X, [2, 1, 1, 1]), {}),
    ("slice.Tensor", (X, 2, 1, 2**63 - 1), {}),
    ("slice.Tensor", (X, -1, 0, 4, 2), {}),
    ("slice.Tensor", (X, 1, -2), {}),
    ("select.int", (X, 1, 2), {}),
    ("narrow.default", (X, -1, 1, 2), {}),
    ("cat.default", ([X, Y], -1), {}),
    ("concat.default", ([X, Y], -1), {}),
    ("stack.default", ([X, Y], -1), {}),
    ("flatten.using_ints", (X, -2), {}),
    ("flatten.using_ints", (X, 0, 1), {}),
    ("repeat_interleave.self_int", (X, 2, -1), {}),
    ("repeat_interleave.self_int", (X, 3), {}),
    ("split.Tensor", (X, 3, -1), {}),
    ("split_with_sizes.default", (X, [1, 3], 2), {}),
    ("chunk.default", (X, 3, 2), {}),
    ("embedding.default", (W, IDS), {}),
    ("gather.default", (X[0], 0, np.array([[2, 0, 1, 1]])), {}),
    ("gather.default", (X, 1, np.array([[[2], [0]], [[1], [1]]])), {}),
    ("index.Tensor", (X, [np.array([0, 1, 1]), np.array([2, 0, 1])]), {}),
    ("index.Tensor", (X, [None, np.array([2, 0])]), {}),
    ("arange.default", (5,), {}),
    ("zeros.default", ([2, 3],), {}),
    ("full.default", ([2, 3], -1.5), {}),
    ("new_zeros.default", (X, [2, 2]), {}),
    ("new_ones.default", (X, [2, 2]), {}),
    ("to.dtype", (X, torch.int32), {}),
    ("to.device", (X, torch.device("cpu"), torch.float16), {}),
    ("to.dtype_layout", (X,), {"dtype": torch.float16}),
    ("_to_copy.default", (X,), {"dtype": torch.float16}),
    ("type_as.default", (X, IDS), {}),
    ("contiguous.default", (X,), {}),
    ("clone.default", (X,), {}),
    ("detach.default", (X,), {}),
    ("alias.default", (X,), {}),
    ("dropout.default", (X, 0.1, False), {}),
]


def operator(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def for_torch(value: Any) -> Any:
    if isinstance(value, list):
        return [for_torch(v) for v in value]
    if isinstance(value, np.ndarray):
        integer = value.dtype.kind == "i"
        return torch.from_numpy(value.astype(np.int64) if integer else value.copy())
    return value


def for_jax(value: Any) -> Any:
    import jax.numpy as jnp

    if isinstance(value, list):
        return [for_jax(v) for v in value]
    if isinstance(value, torch.dtype):
        return np.dtype(str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return None
    return jnp.asarray(value) if isinstance(value, np.ndarray) else value


@default_cases(35)
@pytest.mark.parametrize(("name", "args", "kwargs"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_a_rule_gives_what_torch_gives(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    from llmc.compiler.targets.xla.operators import RULES

    target = operator(name)
    wanted = target(*for_torch(list(args)), **kwargs)
    named = dict(zip((a.name for a in target._schema.arguments), args, strict=False)) | kwargs
    got = RULES[name](**{k: v for k, given in named.items() if (v := for_jax(given)) is not None})
    several = isinstance(wanted, list | tuple)
    for have, want in zip(got if several else [got], wanted if several else [wanted], strict=True):
        np.testing.assert_allclose(np.asarray(have), want.numpy(), rtol=2e-6, atol=2e-6)


def test_every_rule_is_tried() -> None:
    from llmc.compiler.targets.xla.operators import RULES

    ours = {"llmc.attend.default"}  # attention/test_attend.py
    stateful = {f"llmc.{name.split(maxsplit=1)[0]}.default" for name in STATEFUL}
    assert set(RULES) == {name for name, *_ in CASES} | ours | stateful


@default_cases(1)
@pytest.mark.parametrize("name", STATEFUL)
def test_operators_of_layers_with_a_state_compute_what_they_mean(name: str) -> None:
    from llmc.compiler.frontend import recurrent
    from llmc.compiler.targets.xla.operators import RULES

    kind, given = name.split(maxsplit=1)[0], STATEFUL[name](20)
    schema = getattr(torch.ops.llmc, kind).default._schema
    named = {a.name: value for a, value in zip(schema.arguments, given, strict=True) if value is not None}
    jaxed = {k: for_jax(v.numpy()) if isinstance(v, torch.Tensor) else v for k, v in named.items()}
    out, state = RULES[f"llmc.{kind}.default"](**jaxed)
    wanted, kept = getattr(recurrent, kind)(*given)
    np.testing.assert_allclose(state, kept.numpy(), rtol=2e-4, atol=2e-4)
    for row, live in enumerate([t for t in given if isinstance(t, torch.Tensor)][-1]):
        np.testing.assert_allclose(out[row, : int(live)], wanted[row, :live].numpy(), rtol=2e-4, atol=2e-4)


def test_of_equal_values_the_largest_have_the_lower_index_first() -> None:
    from llmc.compiler.targets.xla.operators import RULES

    _, ids = RULES["topk.default"](for_jax(np.array([[1.0, 3.0, 3.0, 2.0, 3.0]], np.float32)), 2)

    assert ids.tolist() == [[1, 2]]


def test_float32_matmuls_request_full_precision_and_16_bit_ones_do_not() -> None:
    import jax

    from llmc.compiler.targets.xla.operators import RULES

    def text(dtype: str) -> str:
        given = jax.ShapeDtypeStruct((4, 4), dtype)
        return jax.jit(RULES["linear.default"]).lower(given, given).as_text()

    assert "HIGHEST" in text("float32")
    assert "HIGHEST" not in text("bfloat16")
