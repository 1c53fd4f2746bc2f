"""Attention in ONNX: every form of it gives the numbers of `llmc::attention` (frontend/attention.py).

Rows have pasts of their own, and what lies in the cache behind them is no number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.program.fuse import fuse_attention
from llmc.compiler.program.ir import Graph, Value
from llmc.compiler.targets.onnxruntime.formats import OnnxOptions
from llmc.compiler.targets.onnxruntime.to_onnx import to_onnx
from tests.compiler.targets.onnxruntime.sketch import Sketch, by_onnx, by_torch

CAPACITY, POSITIONS, TOKEN_SLOTS = 24, 32, 20


@dataclass(frozen=True)
class Case:
    """`turned`: how many values of a head turn; `operator`: whether ONNX Runtime's own runs it."""

    operator: bool
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    softcap: float = 0.0
    window: int = -1
    sinks: bool = False
    slopes: tuple[float, ...] = ()
    by_offset: bool = False
    turned: int = 0

    def graph(self) -> Graph:
        s = Sketch()
        shapes = {"q": (self.heads, self.dim), "k": (self.kv_heads, self.dim), "v": (self.kv_heads, self.value_dim)}
        s.input("token_ids", "B", "Q", dtype="int64")
        past = s.input("past_lengths", "B", dtype="int64")
        q, k, v = (s.input(name, "B", heads, "Q", width) for name, (heads, width) in shapes.items())
        caches = [s.input(f"past_{n}0", "B", self.kv_heads, "S", shapes[n][1]) for n in "kv"]
        more = [s.weight("sinks", self.heads) if self.sinks else None]
        if self.by_offset:
            table = np.random.default_rng(2).normal(0, 1, (self.heads, TOKEN_SLOTS)).astype(np.float32)
            more.append(s.table("by_offset", table))
        if self.turned:
            q, k = (self.rotated(s, x) for x in (q, k))
        built = s.node(
            "attention", q, k, v, *caches, past, *more, scale=0.3, softcap=self.softcap, window=self.window,
            shapes=[("B", "Q", self.heads, self.value_dim), *(c.shape for c in caches)],
            **({"slopes": list(self.slopes)} if self.slopes else {}),
        )  # fmt: skip
        return s.done(*built.outputs)

    def rotated(self, s: Sketch, x: Value) -> Value:
        width, half = self.turned, self.turned // 2
        part = x
        if width < self.dim:
            part = s.slice(x, dim=3, start=0, end=width, shape=(*x.shape[:3], width))
        cos, sin = (self.angles(s, name, half) for name in ("cos", "sin"))
        low = s.slice(part, dim=3, start=0, end=half, shape=(*x.shape[:3], half))
        high = s.slice(part, dim=3, start=half, end=2**63 - 1, shape=(*x.shape[:3], half))
        turned = s.cat(s.neg(high), low, dim=-1, shape=part.shape)
        part = s.add(s.mul(part, cos), s.mul(turned, sin))
        if width == self.dim and self.window < 0:
            return part  # with a window the empty rest stays, as some models write it
        rest = s.slice(x, dim=3, start=width, end=2**63 - 1, shape=(*x.shape[:3], self.dim - width))
        return s.cat(part, rest, dim=-1, shape=x.shape)

    def angles(self, s: Sketch, name: str, half: int) -> Value:
        """Of each token, the same value for queries and keys."""
        for node in s.graph.nodes:
            if node.op == "position_table" and node.inputs[0] is not None and node.inputs[0].name == name:
                return node.out
        random = np.random.default_rng(len(name) + ord(name[0]))
        table = s.table(name, np.tile(random.normal(0, 1, (POSITIONS, half)).astype(np.float32), 2))
        past, ids = s.graph.inputs["past_lengths"], s.graph.inputs["token_ids"]
        return s.position_table(table, past, ids, shape=("B", 1, "Q", 2 * half))

    def feed(self, batch: int, tokens: int, past: list[int]) -> dict[str, NDArray[Any]]:
        random = np.random.default_rng(8)
        widths = {"q": (self.heads, self.dim), "k": (self.kv_heads, self.dim), "v": (self.kv_heads, self.value_dim)}
        built: dict[str, NDArray[Any]] = {
            n: random.normal(0, 1, (batch, h, tokens, w)).astype(np.float32) for n, (h, w) in widths.items()
        }
        for n in "kv":
            cache = random.normal(0, 1, (batch, self.kv_heads, CAPACITY, widths[n][1])).astype(np.float32)
            for row, length in enumerate(past):
                cache[row, :, length:] = np.nan
            built[f"past_{n}0"] = cache
        return {**built, "past_lengths": np.array(past), "token_ids": np.ones((batch, tokens), np.int64)}


CASES = {
    "groups": Case(True),
    "heads of 8": Case(True, dim=8, value_dim=8),
    "soft cap": Case(True, softcap=1.5),
    "window": Case(True, window=5),
    "sinks": Case(True, sinks=True),
    "slopes": Case(False, slopes=(0.5, 0.25, 0.125, 0.0625)),
    "a table of places": Case(False, by_offset=True),
    "sinks and a table": Case(False, sinks=True, by_offset=True),
    "turned": Case(True, turned=16),
    "turned, with an empty rest": Case(True, turned=16, window=5),
    "half turned": Case(True, dim=32, value_dim=32, turned=16),
    "a quarter turned": Case(False, dim=32, value_dim=32, turned=8),
    "heads of 8 turned": Case(False, dim=8, value_dim=8, turned=8),
    "heads of 12": Case(False, dim=12, value_dim=12),
    "narrow values": Case(False, dim=24, value_dim=16),
    "all at once": Case(False, dim=24, value_dim=16, softcap=1.5, window=5, sinks=True, turned=8),
}
STEPS = {"prompts": (3, 7, [0, 0, 0]), "a chunk": (1, 5, [9]), "decode": (3, 1, [17, 4, 0])}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", CASES)
def test_attention_over_ragged_nan_filled_caches(name: str, step: str) -> None:
    case, (batch, tokens, past) = CASES[name], STEPS[step]
    feed = case.feed(batch, tokens, past)
    exact = by_torch(case.graph(), feed)
    graph = case.graph()
    fuse_attention(graph)
    graph.prune()
    assert not {"cat", "position_table"} & {node.op for node in graph.nodes}
    out, *present = by_onnx(graph, feed)
    np.testing.assert_allclose(out, exact[0], rtol=1e-5, atol=1e-5)
    for got, wanted in zip(present, exact[1:], strict=True):
        for row, length in enumerate(past):
            live = slice(0, length + tokens)
            np.testing.assert_allclose(got[row, :, live], wanted[row, :, live], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_onnx_runtimes_own_operator_runs_what_it_can(name: str) -> None:
    graph = CASES[name].graph()
    fuse_attention(graph)
    graph.prune()
    types = {node.op_type for node in to_onnx(graph, OnnxOptions(0)).model.graph.node}
    assert ("GroupQueryAttention" in types) is CASES[name].operator
