"""Operators of ATen in an OpenVINO model, whose tokens are laid end to end: ATen's own numbers, or a word why not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmc.compiler.program.ir import Graph, Value
from llmc.compiler.targets.openvino.formats import Constants, WeightFormat
from llmc.compiler.targets.openvino.graph_model import GraphModel, model_of, parameter
from llmc.compiler.targets.openvino.plain import PLAIN, axis_of, beside, order_of, token_axes
from llmc.errors import CompileError
from llmc.runtime.executors.openvino.device import open_core
from tests.compiler.targets.onnxruntime.sketch import Sketch, by_torch, weight_of
from tests.compiler.targets.onnxruntime.test_plain import CASES, TOKENS, WIDTH, chosen, feed, sketched
from tests.compiler.targets.openvino.static_models import EXACT
from tests.tiers import default_cases

NAMES = [(op, at) for op, cases in CASES.items() if op in PLAIN for at in range(len(cases))]
REFUSED = {
    ("mean", 1): "along batch or tokens", ("sum", 1): "along batch or tokens", ("amax", 1): "along batch or tokens",
    ("index", 2): "along other axes than a table's first",
    ("matmul", 0): "a matmul of",
    ("position_table", 1): "tokens along other axes", ("index", 1): "along other axes than a table's first",
}  # fmt: skip
"""What mixes tokens, or puts them elsewhere than first."""


class Given(WeightFormat):
    """Weights that follow from their names."""

    def vector(self, source: str, shape: tuple[int, ...]) -> Any:
        return self.constants.table(source, weight_of(source, shape))

    def matrix(self, sources: Any, shapes: Any, *, reordered: bool = False) -> Any:
        (source,), (shape,) = sources, shapes
        return self.vector(source, shape)


def laid_out(array: np.ndarray, shape: tuple[Any, ...]) -> np.ndarray:
    """A result of ATen's as the model has it."""
    held = token_axes(shape)
    moved = np.moveaxis(array, held, range(len(held)))
    return moved.reshape(-1, *moved.shape[len(held) :]) if held else array


def by_openvino(graph: Graph, given: dict[str, Any]) -> list[np.ndarray]:
    inputs = {name: parameter(name, [-1, *v.shape[2:]], np.float32) for name, v in graph.inputs.items() if name in "xy"}
    positions = parameter("position_ids", [-1], np.int64)
    model = GraphModel(graph, Given(Constants()))
    model.emit({"position_ids": positions}, {graph.inputs[name]: node for name, node in inputs.items()})
    outputs = [(name, ov_value) for name, v in graph.outputs for ov_value in [model.get(v)]]
    compiled = open_core().compile_model(model_of([*inputs.values(), positions], outputs), "CPU", EXACT)
    fed = [given[name].reshape(-1, WIDTH) for name in inputs]
    built = compiled([*fed, (given["past_lengths"][:, None] + np.arange(TOKENS)).ravel()])
    return [built[name] for name, _ in graph.outputs]


@default_cases(23)
@pytest.mark.parametrize(("op", "at"), [name for name in NAMES if name not in REFUSED])
def test_an_operator_gives_atens_numbers(op: str, at: int) -> None:
    graph = sketched(CASES[op][at])
    for got, exact, (_, v) in zip(by_openvino(graph, feed()), by_torch(graph, feed()), graph.outputs, strict=True):
        np.testing.assert_allclose(got, laid_out(exact, v.shape), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("op", "at"), REFUSED)
def test_what_mixes_tokens_is_refused_with_its_name(op: str, at: int) -> None:
    with pytest.raises(CompileError, match=f"{REFUSED[op, at]}.* %"):
        by_openvino(sketched(CASES[op][at]), feed())


def test_every_operator_has_a_case() -> None:
    elsewhere = {"reshape", "view", "flatten", "unflatten", "squeeze", "experts", "expert_linear", "matmul"}
    without = {"arange", "zeros", "new_ones", "matmul", "bmm", "baddbmm"}
    assert PLAIN.keys() - elsewhere == CASES.keys() - without


@pytest.mark.parametrize("each", [False, True], ids=["one row a token", "a row for each of its experts"])
@pytest.mark.parametrize("turned", [False, True])
def test_experts_that_were_not_fused_give_each_token_its_own(each: bool, turned: bool) -> None:
    s = Sketch()
    x, y = s.input("x", "B", "Q", WIDTH), s.input("y", "B", "Q", WIDTH)
    _, ids = chosen(s, s.view(y, shape=("B*Q", WIDTH)), k=2)
    ids = Value(ids.name, ("B*Q", 2), "int64")
    rows = s.view(x, shape=("B*Q", 2, WIDTH // 2)) if each else s.view(x, shape=("B*Q", WIDTH))
    width, features = int(rows.shape[-1]), 6
    weight = s.weight("w", WIDTH, *((width, features) if turned else (features, width)))
    node = s.node(
        "expert_linear", rows, weight, s.weight("b", WIDTH, features), s.graph.nodes[1].outputs[1],
        shapes=[("B*Q", 2, features)], transposed=turned,
    )  # fmt: skip
    (got,) = by_openvino(s.done(node.out), feed())
    given, w = feed()["x"].reshape(-1, *[int(d) for d in rows.shape[1:]]), weight_of("w", weight.shape)
    best = np.argsort(-feed()["y"].reshape(-1, WIDTH), -1)[:, :2]
    for t in range(len(best)):
        for k, expert in enumerate(best[t]):
            row = given[t, k] if each else given[t]
            wanted = row @ (w[expert] if turned else w[expert].T) + weight_of("b", (WIDTH, features))[expert]
            np.testing.assert_allclose(got[t, k], wanted, rtol=1e-4, atol=1e-5)


def test_where_the_axes_of_a_value_are() -> None:
    heads = Value("heads", ("B", 4, "Q", 16), "float32")
    assert (token_axes(heads.shape), token_axes(("B*Q", 8)), token_axes((4, 8))) == ((0, 2), (0,), ())
    assert [axis_of(heads, axis, "") for axis in (1, -1)] == [1, 2]
    assert order_of(heads, [0, 2, 1, 3], "") == [0, 1, 2], "tokens alone move: nothing does"
    assert order_of(heads, [0, 3, 2, 1], "") == [0, 2, 1]
    assert beside(Value("bias", (16,), "float32"), heads, "") is None
    assert beside(Value("scale", (4, 1, 16), "float32"), heads, "") == [4, 16]
    for turned in (("B", "Q", 4, 16), ("B", 4, 16)):
        with pytest.raises(CompileError, match="tokens along other axes"):
            beside(Value("other", turned, "float32"), heads, "")
    with pytest.raises(CompileError, match="sizes of its own for tokens"):
        beside(Value("mask", (5, 16), "float32"), heads, "")


def test_heads_of_all_tokens_follow_their_tokens() -> None:
    heads = Value("heads", (f"{WIDTH // 2}*B*Q", 2), "float32")
    assert token_axes(heads.shape) == (0,)
    assert axis_of(heads, -1, "") == 2

    def turned_inside(s: Sketch, x: Value, _: Value) -> Value:
        apart = s.view(x, shape=heads.shape)
        return s.view(s.softmax(apart, dim=-1), shape=("B", "Q", WIDTH))

    (got,) = by_openvino(sketched(turned_inside), feed())
    raised = np.exp(feed()["x"].reshape(-1, WIDTH // 2, 2))
    np.testing.assert_allclose(got, (raised / raised.sum(-1, keepdims=True)).reshape(got.shape), rtol=2e-5)
    with pytest.raises(CompileError, match="no OpenVINO lowering"):
        order_of(heads, [1, 0], "")


def test_a_matrix_times_tokens_that_are_columns_is_each_tokens_matmul() -> None:
    def matmul(s: Sketch, x: Value, _: Value) -> Value:
        columns = s.transpose(x, shape=("B", WIDTH, "Q"), dim0=1, dim1=2)
        return s.matmul(s.weight("w", 3, WIDTH), columns, shape=("B", 3, "Q"))

    (got,) = by_openvino(sketched(matmul), feed())
    np.testing.assert_allclose(got, feed()["x"].reshape(-1, WIDTH) @ weight_of("w", (3, WIDTH)).T, rtol=2e-5, atol=2e-6)


def test_a_reshape_that_hides_tokens_is_refused() -> None:
    def hidden(s: Sketch, x: Value, _: Value) -> Value:
        return s.view(x, shape=("B", f"{WIDTH}*Q"))

    for case in (hidden, lambda s, x, _: s.view(x, shape=(WIDTH, "B*Q"))):
        with pytest.raises(CompileError, match=r"no OpenVINO lowering \(at %view"):
            by_openvino(sketched(case), feed())
