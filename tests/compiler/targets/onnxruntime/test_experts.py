"""Experts on ONNX Runtime: the model's own choice and shares, whatever they add up to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llmc.compiler.frontend import traceable as _operators  # noqa: F401 - registers llmc's
from llmc.compiler.program.ir import Graph
from tests.compiler.targets.onnxruntime.sketch import Array, Sketch, by_onnx, weight_of

HIDDEN, FEATURES, COUNT, CHOSEN = 32, 48, 6, 2


def sketched(features: int = FEATURES) -> Graph:
    s = Sketch()
    x, shares = s.input("x", "T", HIDDEN), s.input("shares", "T", CHOSEN)
    ids = s.input("ids", "T", CHOSEN, dtype="int64")
    gate_up, down = s.weight("gate_up", COUNT, 2 * features, HIDDEN), s.weight("down", COUNT, HIDDEN, features)
    return s.done(s.experts(x, ids, shares, gate_up, down))


def given(tokens: int) -> dict[str, Any]:
    draw = np.random.default_rng(5)
    ids = np.stack([draw.permutation(COUNT)[:CHOSEN] for _ in range(tokens)])
    shares = draw.uniform(0.01, 3, (tokens, CHOSEN)).astype(np.float32)
    return {"x": draw.normal(0, 1, (tokens, HIDDEN)).astype(np.float32), "ids": ids, "shares": shares}


def wanted(x: Array, ids: Array, shares: Array, gate_up: Array, down: Array) -> Array:
    """Each token by itself, in float64."""
    out = np.zeros((len(x), HIDDEN))
    for token, chosen in enumerate(ids):
        for expert, share in zip(chosen, shares[token], strict=True):
            gate, up = np.split(gate_up[expert].astype(np.float64) @ x[token], 2)
            out[token] += share * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out.astype(np.float32)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_results_are_the_chosen_experts_in_their_shares(tokens: int) -> None:
    feed = given(tokens)
    matrices = weight_of("gate_up", (COUNT, 2 * FEATURES, HIDDEN)), weight_of("down", (COUNT, HIDDEN, FEATURES))
    (built,) = by_onnx(sketched(), feed)
    exact = wanted(**feed, gate_up=matrices[0], down=matrices[1])
    np.testing.assert_allclose(built, exact, atol=2e-5 * np.abs(exact).max(), rtol=1e-5)


@pytest.mark.parametrize("transposed", [False, True], ids=["[out, in]", "[in, out]"])
@pytest.mark.parametrize("of_each", [False, True], ids=["a token's row", "a row for each expert"])
def test_matmuls_that_nothing_fuses_are_those_of_the_operator(transposed: bool, of_each: bool) -> None:
    s, tokens = Sketch(), 5
    form = (COUNT, HIDDEN, FEATURES) if transposed else (COUNT, FEATURES, HIDDEN)
    given_shape = (CHOSEN, HIDDEN) if of_each else (HIDDEN,)
    x, ids = s.input("x", "T", *given_shape), s.input("ids", "T", CHOSEN, dtype="int64")
    weight, bias = s.weight("weight", *form), s.weight("bias", COUNT, FEATURES)
    built = s.expert_linear(x, weight, bias, ids, shape=("T", CHOSEN, FEATURES), transposed=transposed)
    graph = s.done(built)
    draw = np.random.default_rng(1)
    feed = {"x": draw.normal(0, 1, (tokens, *given_shape)).astype(np.float32), "ids": given(tokens)["ids"]}
    matrices = [torch.from_numpy(weight_of(n, shape)) for n, shape in (("weight", form), ("bias", (COUNT, FEATURES)))]
    rows, chosen = (torch.from_numpy(feed[name]) for name in ("x", "ids"))
    wanted = torch.ops.llmc.expert_linear(rows, *matrices, chosen, transposed)
    (found,) = by_onnx(graph, feed)
    np.testing.assert_allclose(found, wanted.numpy(), atol=2e-5, rtol=1e-5)


def test_a_token_of_no_number_leaves_the_others_alone() -> None:
    feed = given(5)
    (clean,) = by_onnx(sketched(), feed)
    for member in ("x", "shares"):
        spoiled = {**feed, member: feed[member].copy()}
        spoiled[member][2] = np.nan
        (built,) = by_onnx(sketched(), spoiled)
        np.testing.assert_allclose(np.delete(built, 2, 0), np.delete(clean, 2, 0), rtol=1e-4, atol=1e-4)
