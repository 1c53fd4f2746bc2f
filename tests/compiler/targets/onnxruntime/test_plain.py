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

BATCH, TOKENS, WIDTH = 2, 3, 8
ROW = (BATCH, TOKENS, WIDTH)
Case = Callable[[Sketch, Value, Value], "Value | tuple[Value, ...]"]


def mean(s: Sketch, x: Value, _: Value) -> Value:
    return s.mean(x, dim=[-1], keepdim=True, shape=("B", "Q", 1))


def cut(op: str, parts: list[int], **attrs: Any) -> Case:
    """`op` along the last axis, into `parts`."""

    def made(s: Sketch, x: Value, _: Value) -> tuple[Value, ...]:
        return tuple(s.node(op, x, shapes=[("B", "Q", n) for n in parts], dim=-1, **attrs).outputs)

    return made


def looked_up(shape: tuple[Any, ...]) -> Case:
    def made(s: Sketch, x: Value, _: Value) -> Value:
        table = s.table("angles", np.random.default_rng(3).normal(0, 1, (16, WIDTH)).astype(np.float32))
        past, ids = s.graph.inputs["past_lengths"], s.graph.inputs["token_ids"]
        return s.add(x, s.position_table(table, past, ids, shape=shape))

    return made


CASES: dict[str, list[Case]] = {
    **{op: [lambda s, x, y, op=op: getattr(s, op)(x, y), lambda s, x, _, op=op: getattr(s, op)(x, other=1.75)]
       for op in ("add", "sub", "mul", "div")},
    **{op: [lambda s, x, _, op=op: getattr(s, op)(x)]
       for op in ("neg", "tanh", "sigmoid", "relu", "exp", "softplus", "silu")},
    **{op: [lambda s, x, _, op=op: getattr(s, op)(s.exp(x))] for op in ("sqrt", "rsqrt")},
    "pow": [lambda s, x, _: s.pow(x, exponent=2), lambda s, x, _: s.pow(s.exp(x), exponent=-0.5)],
    "gelu": [lambda s, x, _: s.gelu(x), lambda s, x, _: s.gelu(x, approximate="tanh")],
    "mean": [mean],
    "sum": [lambda s, x, _: s.sum(x, dim=[1], keepdim=False, shape=("B", WIDTH))],
    "layer_norm": [
        lambda s, x, _: s.layer_norm(x, s.weight("w", WIDTH), s.weight("b", WIDTH), normalized_shape=[WIDTH], eps=1e-3),
        lambda s, x, _: s.layer_norm(x, s.weight("w", WIDTH), None, normalized_shape=[WIDTH]),
        lambda s, x, _: s.layer_norm(x, None, None, normalized_shape=[WIDTH]),
    ],
    "cat": [lambda s, x, y: s.cat(x, y, dim=-1, shape=("B", "Q", 2 * WIDTH))],
    "slice": [lambda s, x, _: s.slice(x, dim=2, start=2, end=2**63 - 1, shape=("B", "Q", WIDTH - 2)),
              lambda s, x, _: s.slice(x, dim=2, start=None, end=WIDTH, step=2, shape=("B", "Q", WIDTH // 2))],
    "transpose": [lambda s, x, _: s.transpose(x, dim0=1, dim1=-1, shape=("B", WIDTH, "Q"))],
    "unsqueeze": [lambda s, x, _: s.unsqueeze(x, dim=1, shape=("B", 1, "Q", WIDTH))],
    "softmax": [lambda s, x, _: s.softmax(x, dim=-1)],
    "split": [cut("split", [3, 3, 2], split_size=3)],
    "split_with_sizes": [cut("split_with_sizes", [5, 1, 2], split_sizes=[5, 1, 2])],
    "chunk": [cut("chunk", [4, 4], chunks=2)],
    "position_table": [looked_up(("B", "Q", WIDTH)), looked_up(("B", 1, "Q", WIDTH))],
}  # fmt: skip


def sketched(case: Case) -> Graph:
    s = Sketch()
    x, y = s.input("x", "B", "Q", WIDTH), s.input("y", "B", "Q", WIDTH)
    s.input("token_ids", "B", "Q", dtype="int64")
    s.input("past_lengths", "B", dtype="int64")
    made = case(s, x, y)
    return s.done(*(made if isinstance(made, tuple) else (made,)))


def feed() -> dict[str, Any]:
    random = np.random.default_rng(1)
    floats: dict[str, Array] = {name: random.normal(0, 1.5, ROW).astype(np.float32) for name in "xy"}
    return {**floats, "token_ids": np.ones((BATCH, TOKENS), np.int64), "past_lengths": np.array([4, 0])}


@pytest.mark.parametrize(("op", "case"), [(op, case) for op, cases in CASES.items() for case in cases])
def test_an_operator_gives_atens_numbers(op: str, case: Case) -> None:
    graph = sketched(case)
    assert op in {node.op for node in graph.nodes}
    for got, exact in zip(by_onnx(graph, feed()), by_torch(graph, feed()), strict=True):
        assert got.shape == exact.shape
        np.testing.assert_allclose(got, exact, rtol=2e-6, atol=2e-6)


def test_every_operator_has_a_case() -> None:
    assert CASES.keys() == PLAIN.keys()


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (lambda s, x, _: s.slice(x, dim=1, start="Q - 1", end=2**63 - 1), r"slice from Q - 1 .*at %slice_1_0"),
        (lambda s, x, _: s.layer_norm(x, None, None, normalized_shape=[TOKENS, WIDTH]), r"layer_norm over \[3, 8\]"),
        (lambda s, x, _: s.chunk(x, dim=1, chunks=2), "chunk along a dimension of unknown size"),
    ],
)
def test_what_has_no_onnx_form_is_named(case: Case, why: str) -> None:
    with pytest.raises(CompileError, match=why):
        by_onnx(sketched(case), feed())
