"""Operators of ATen that no kernel fuses: ONNX Runtime gives ATen's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmc.compiler.program.ir import Graph, Value
from llmc.compiler.targets.onnxruntime.plain import PLAIN
from llmc.errors import CompileError
from tests.compiler.targets.onnxruntime.sketch import Array, Sketch, by_onnx, by_torch
from tests.tiers import default_cases

BATCH, TOKENS, WIDTH = 2, 3, 8
ROW = (BATCH, TOKENS, WIDTH)
Case = Callable[[Sketch, Value, Value], "Value | tuple[Value, ...]"]


def mean(s: Sketch, x: Value, _: Value) -> Value:
    return s.mean(x, dim=[-1], keepdim=True, shape=("B", "Q", 1))


def cut(op: str, parts: list[int], **attrs: Any) -> Case:
    """`op` along the last axis, into `parts`."""

    def built(s: Sketch, x: Value, _: Value) -> tuple[Value, ...]:
        return tuple(s.node(op, x, shapes=[("B", "Q", n) for n in parts], dim=-1, **attrs).outputs)

    return built


def looked_up(shape: tuple[Any, ...]) -> Case:
    def built(s: Sketch, x: Value, _: Value) -> Value:
        table = s.table("angles", np.random.default_rng(3).normal(0, 1, (16, WIDTH)).astype(np.float32))
        past, ids = s.graph.inputs["past_lengths"], s.graph.inputs["token_ids"]
        return s.add(x, s.position_table(table, past, ids, shape=shape))

    return built


def compared(op: str) -> Case:
    """A choice by what a comparison says."""

    def built(s: Sketch, x: Value, y: Value) -> Value:
        return s.where(getattr(s, op)(x, y, dtype="bool"), x, y, shape=x.shape)

    return built


def chosen(s: Sketch, x: Value, k: int = 3, **attrs: Any) -> tuple[Value, Value]:
    values, ids = s.node(
        "topk", x, shapes=[("B", "Q", k)] * 2, dtype=("float32", "int64"), k=k, dim=-1, **attrs
    ).outputs
    return values, ids


def largest(s: Sketch, x: Value, keepdim: bool) -> tuple[Value, Value]:
    shape = ("B", "Q", 1) if keepdim else ("B", "Q")
    built = s.node("max", x, shapes=[shape] * 2, dtype=("float32", "int64"), dim=-1, keepdim=keepdim)
    return built.outputs[0], built.outputs[1]


def masks(op: str, count: int) -> Case:
    def built(s: Sketch, x: Value, y: Value) -> Value:
        both = [s.gt(v, other=0.25, dtype="bool") for v in (x, y)[:count]]
        return s.masked_fill(x, getattr(s, op)(*both, dtype="bool"), value=-2.5)

    return built


def reduced(op: str) -> list[Case]:
    return [
        lambda s, x, _: getattr(s, op)(x, dim=[-1], keepdim=True, shape=("B", "Q", 1)),
        lambda s, x, _: getattr(s, op)(x, dim=[1], keepdim=False, shape=("B", WIDTH)),
    ]


CASES: dict[str, list[Case]] = {
    **{op: [lambda s, x, y, op=op: getattr(s, op)(x, y), lambda s, x, _, op=op: getattr(s, op)(x, other=1.75)]
       for op in ("add", "sub", "mul", "div")},
    **{op: [lambda s, x, y, op=op: getattr(s, op)(x, y)] for op in ("maximum", "minimum")},
    "rsub": [lambda s, x, _: s.rsub(x, other=1.0)],
    **{op: [lambda s, x, _, op=op: getattr(s, op)(x)]
       for op in ("neg", "abs", "tanh", "sigmoid", "relu", "exp", "softplus", "silu", "square", "sin", "cos")},
    **{op: [lambda s, x, _, op=op: getattr(s, op)(s.exp(x))] for op in ("sqrt", "rsqrt", "log", "reciprocal")},
    **{op: [compared(op)] for op in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{op: [masks(op, 2)] for op in ("logical_and", "bitwise_and", "__and__")},
    "add_": [lambda s, x, y: s.add_(s.exp(x), y)],
    "min": [lambda s, x, y: s.min(x, y)],
    "arange": [lambda s, x, _: s.add(x, s.to(s.unsqueeze(
        s.node("arange", shapes=[("Q",)], dtype="int64", end="Q").out, dim=-1, shape=("Q", 1), dtype="int64")))],
    **{op: [lambda s, x, _, op=op: s.add(x, s.node(op, shapes=[x.shape]).out)] for op in ("zeros", "new_ones")},
    "unbind": [lambda s, x, _: tuple(s.node("unbind", x, shapes=[("B", "Q")] * WIDTH, dim=-1).outputs)],
    **{op: [masks(op, 1)] for op in ("logical_not", "bitwise_not")},
    "masked_fill": [masks("logical_not", 1)],
    "where": [lambda s, x, _: s.where(s.gt(x, other=0.0, dtype="bool"), x, other=-1.5, shape=x.shape),
              compared("le")],
    "clamp": [lambda s, x, _: s.clamp(x, min=-0.5, max=0.5), lambda s, x, _: s.clamp(x, max=0.25),
              lambda s, x, y: s.clamp(x, y), lambda s, x, y: s.clamp(x, None, y)],
    "clamp_min": [lambda s, x, _: s.clamp_min(x, min=0.1)],
    "clamp_max": [lambda s, x, _: s.clamp_max(x, max=0.1)],
    **{op: [lambda s, x, _, op=op: s.to(getattr(s, op)(x, dtype="int64"))] for op in ("to", "_to_copy")},
    "type_as": [lambda s, x, _: s.type_as(s.to(x, dtype="int64"), x)],
    **{op: [lambda s, x, _, op=op: s.add(x, getattr(s, op)(x))] for op in ("zeros_like", "ones_like")},
    "full_like": [lambda s, x, _: s.full_like(x, fill_value=0.5)],
    "pow": [lambda s, x, _: s.pow(x, exponent=2), lambda s, x, _: s.pow(s.exp(x), exponent=-0.5)],
    "gelu": [lambda s, x, _: s.gelu(x), lambda s, x, _: s.gelu(x, approximate="tanh")],
    **{op: reduced(op) for op in ("mean", "sum", "amax")},
    "layer_norm": [
        lambda s, x, _: s.layer_norm(x, s.weight("w", WIDTH), s.weight("b", WIDTH), normalized_shape=[WIDTH], eps=1e-3),
        lambda s, x, _: s.layer_norm(x, s.weight("w", WIDTH), None, normalized_shape=[WIDTH]),
        lambda s, x, _: s.layer_norm(x, None, None, normalized_shape=[WIDTH]),
    ],
    **{op: [lambda s, x, y, op=op: getattr(s, op)(
        x, s.transpose(y, dim0=1, dim1=2, shape=("B", WIDTH, "Q")), shape=("B", "Q", "Q"))]
       for op in ("matmul", "bmm")},
    "addmm": [lambda s, x, _: s.addmm(
        s.weight("b", 5), s.view(x, shape=("B*Q", WIDTH)), s.weight("w", WIDTH, 5), shape=("B*Q", 5))],
    "baddbmm": [lambda s, x, y: s.baddbmm(
        s.weight("b", 1, 1, 1), x, s.transpose(y, dim0=1, dim1=2, shape=("B", WIDTH, "Q")), shape=("B", "Q", "Q"))],
    "cat": [lambda s, x, y: s.cat(x, y, dim=-1, shape=("B", "Q", 2 * WIDTH))],
    "concat": [lambda s, x, y: s.concat(x, y, dim=-1, shape=("B", "Q", 2 * WIDTH))],
    "max": [lambda s, x, _: largest(s, x, keepdim=True), lambda s, x, _: largest(s, x, keepdim=False)],
    "stack": [lambda s, x, y: s.stack(x, y, dim=-1, shape=("B", "Q", WIDTH, 2))],
    "slice": [lambda s, x, _: s.slice(x, dim=2, start=2, end=2**63 - 1, shape=("B", "Q", WIDTH - 2)),
              lambda s, x, _: s.slice(x, dim=2, start=None, end=WIDTH, step=2, shape=("B", "Q", WIDTH // 2))],
    "select": [lambda s, x, _: s.select(x, dim=2, index=3, shape=("B", "Q"))],
    "transpose": [lambda s, x, _: s.transpose(x, dim0=1, dim1=-1, shape=("B", WIDTH, "Q"))],
    "permute": [lambda s, x, _: s.permute(x, dims=[0, -1, 1], shape=("B", WIDTH, "Q"))],
    "unsqueeze": [lambda s, x, _: s.unsqueeze(x, dim=1, shape=("B", 1, "Q", WIDTH))],
    "expand": [lambda s, x, _: s.expand(
        s.mean(x, dim=[-1], keepdim=True, shape=("B", "Q", 1)), shape=("B", "Q", 4))],
    "repeat_interleave": [lambda s, x, _: s.repeat_interleave(x, repeats=2, dim=-1, shape=("B", "Q", 2 * WIDTH))],
    "softmax": [lambda s, x, _: s.softmax(x, dim=-1)],
    "cumsum": [lambda s, x, _: s.cumsum(x, dim=-1)],
    "topk": [lambda s, x, _: chosen(s, x), lambda s, x, _: chosen(s, x, largest=False)],
    "gather": [lambda s, x, y: s.gather(y, chosen(s, x)[1], dim=-1, shape=("B", "Q", 3))],
    "scatter": [lambda s, x, _: s.scatter(x, chosen(s, x)[1], dim=-1, value=9.0),
                lambda s, x, y: s.scatter(y, chosen(s, x)[1], chosen(s, x)[0], dim=-1)],
    "index": [lambda s, x, _: s.index(s.weight("rows", WIDTH, 4), chosen(s, x)[1], shape=("B", "Q", 3, 4)),
              lambda s, x, _: s.index(
                  s.weight("rows", 4, WIDTH), None, chosen(s, x)[1], shape=(4, "B", "Q", 3)),
              lambda s, x, y: s.index(
                  s.weight("rows", WIDTH, WIDTH), chosen(s, x)[1], chosen(s, y)[1], shape=("B", "Q", 3))],
    "split": [cut("split", [3, 3, 2], split_size=3)],
    "split_with_sizes": [cut("split_with_sizes", [5, 1, 2], split_sizes=[5, 1, 2])],
    "chunk": [cut("chunk", [4, 4], chunks=2)],
    "position_table": [looked_up(("B", "Q", WIDTH)), looked_up(("B", 1, "Q", WIDTH))],
    "positions": [lambda s, x, _, last=last: s.index(
        s.weight("learned", 16, WIDTH),
        s.positions(s.graph.inputs["past_lengths"], s.graph.inputs["token_ids"], offset=2, last=last,
                    dtype="int64", shape=("B", "Q")), shape=x.shape) for last in (15, 7)],
}  # fmt: skip


def sketched(case: Case) -> Graph:
    s = Sketch()
    x, y = s.input("x", "B", "Q", WIDTH), s.input("y", "B", "Q", WIDTH)
    s.input("token_ids", "B", "Q", dtype="int64")
    s.input("past_lengths", "B", dtype="int64")
    built = case(s, x, y)
    return s.done(*(built if isinstance(built, tuple) else (built,)))


def feed() -> dict[str, Any]:
    random = np.random.default_rng(1)
    floats: dict[str, Array] = {name: random.normal(0, 1.5, ROW).astype(np.float32) for name in "xy"}
    return {**floats, "token_ids": np.ones((BATCH, TOKENS), np.int64), "past_lengths": np.array([4, 0])}


@default_cases(26)
@pytest.mark.parametrize(("op", "case"), [(op, case) for op, cases in CASES.items() for case in cases])
def test_an_operator_gives_atens_numbers(op: str, case: Case) -> None:
    graph = sketched(case)
    assert op in {node.op for node in graph.nodes}
    for got, exact in zip(by_onnx(graph, feed()), by_torch(graph, feed()), strict=True):
        assert got.shape == exact.shape
        np.testing.assert_allclose(got, exact, rtol=2e-6, atol=2e-6)


def test_tokens_that_were_laid_end_to_end_are_put_in_rows_again() -> None:
    """Two sizes are open then; they are measured on the model's inputs."""
    s = Sketch()
    x = s.input("x", "B", "Q", WIDTH)
    flat = s.mul(s.view(x, shape=("B*Q", WIDTH)), other=2.0)
    graph = s.done(
        s.view(flat, shape=("B", "Q", 2, WIDTH // 2)), s.expand(s.weight("row", WIDTH), shape=("B*Q + 1", WIDTH))
    )
    rows, wide = by_onnx(graph, feed())
    np.testing.assert_array_equal(rows, 2 * feed()["x"].reshape(BATCH, TOKENS, 2, WIDTH // 2))
    assert wide.shape == (BATCH * TOKENS + 1, WIDTH)


def test_every_operator_has_a_case() -> None:
    assert CASES.keys() == PLAIN.keys()


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (lambda s, x, _: s.slice(x, dim=1, start="Q - 1", end=2**63 - 1), r"slice from Q - 1 .*at %slice_1_0"),
        (lambda s, x, _: s.layer_norm(x, None, None, normalized_shape=[TOKENS, WIDTH]), r"layer_norm over \[3, 8\]"),
        (lambda s, x, _: s.view(x, shape=("T", "U", WIDTH)), "a size of T is measured on no input of the model"),
        (lambda s, x, _: s.index(x, s.gt(x, other=0.0, dtype="bool")), "indexing by a mask"),
        (lambda s, x, _: s.repeat_interleave(x, repeats=2, dim=None), "repeat_interleave"),
        (lambda s, x, _: s.addmm(x, x, x, beta=2), "addmm with factors"),
        (lambda s, x, _: s.max(x, shape=()), "max of all values"),
        (lambda s, x, _: s.chunk(x, dim=1, chunks=2), "chunk along a dimension of unknown size"),
    ],
)
def test_what_has_no_onnx_form_is_named(case: Case, why: str) -> None:
    with pytest.raises(CompileError, match=why):
        by_onnx(sketched(case), feed())
