"""Graphs that no compile makes, for the kernels to refuse: a program that says what came of each.

    python -m tests.compiler.targets.onnxruntime.kernels.crafted LIBRARY

A line of JSON goes out before a graph runs and one after it, so that a crash names its graph.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.compiler.targets.onnxruntime.kernels.single import run

BIG = 1 << 62


@dataclass(frozen=True)
class Graph:
    """One node, with `change` in the place of what a compile gives it, and the error that says so.

    A change is of an attribute where it is a number, of an input where it is an array, and None leaves an input out.
    """

    op: str
    change: dict[str, Any]
    error: str


def _zeros(*shape: int) -> NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def _cache(*shape: int) -> NDArray[np.float16]:
    return np.zeros(shape, np.float16)


def _lines(slots: int, heads: int, offsets: int, width: int) -> NDArray[np.uint8]:
    return np.zeros((slots, heads, offsets, width + 2), np.uint8)


def _rows(*rows: tuple[int, ...]) -> NDArray[np.int64]:
    return np.array(rows, np.int64).reshape(len(rows), -1)


_APART = {"q": _zeros(1, 3, 64), "k": _zeros(1, 3, 32), "v": _zeros(1, 3, 32)}
_INPUTS: dict[str, dict[str, Any]] = {
    "Attention": {
        "q": _zeros(1, 3, 128), "k": None, "v": None, "past_k": _cache(2, 2, 8, 16), "past_v": _cache(2, 2, 8, 16),
        "rows": _rows((0, 0, 0, 3)), "cos": _zeros(8, 8), "sin": _zeros(8, 8), "sinks": _zeros(4), "slopes": _zeros(4),
    },
    "CodedAttention": {
        "q": _zeros(1, 3, 128), "k": None, "v": None, "past_k": _lines(2, 2, 8, 16), "past_v": _lines(2, 2, 8, 16),
        "rows": _rows((0, 0, 0, 3)), "cos": _zeros(8, 8), "sin": _zeros(8, 8),
    },
    "Linear": {"x": _zeros(2, 64), "w": np.zeros(2 * (64 + 1024), np.uint8), "b": None, "d": None, "words": None},
    "Embedding": {"ids": np.zeros((1, 2), np.int64), "w": np.zeros(2 * (64 + 1024), np.uint8)},
    "AddNorm": {"x": _zeros(2, 16), "r": _zeros(2, 16), "w": _zeros(16), "d": None},
    "Adapted": {
        "base": _zeros(1, 3, 20), "x": _zeros(1, 3, 40), "adapters": np.array([[0, 2, 1]]),
        "low": np.zeros((8, 48), np.uint8), "high": np.zeros((8, 32), np.uint8), "scales": _zeros(8),
        "ends": np.array([0, 3, 8]),
    },
    "Experts": {
        "x": _zeros(2, 64), "ids": np.array([[0, 2], [1, 2]]), "shares": _zeros(2, 2),
        "gate_up": np.zeros(3 * 4 * (64 + 1024), np.uint8), "down": np.zeros(3 * 4 * (64 + 512), np.uint8),
    },
    "ExpertLinear": {
        "x": _zeros(2, 64), "ids": np.array([[0, 2], [1, 2]]), "w": np.zeros(3 * 2 * (64 + 1024), np.uint8), "b": None,
    },
    "CausalConv": {
        "x": _zeros(1, 3, 20), "w": _zeros(20, 4), "b": _zeros(20), "state": _zeros(2, 3, 20),
        "rows": _rows((1, 5, 0, 3)),
    },
    "GatedDelta": {
        "query": _zeros(1, 3, 2, 8), "key": _zeros(1, 3, 2, 8), "value": _zeros(1, 3, 4, 6), "decay": _zeros(1, 3, 4),
        "beta": _zeros(1, 3, 4), "state": _zeros(2, 4, 8, 6), "rows": _rows((1, 5, 0, 3)),
    },
    "StateScan": {
        "x": _zeros(1, 3, 4, 6), "step": _zeros(1, 3, 4), "rate": _zeros(4), "write": _zeros(1, 3, 2, 8),
        "read": _zeros(1, 3, 2, 8), "state": _zeros(2, 4, 6, 8), "rows": _rows((1, 5, 0, 3)),
    },
}  # fmt: skip
_MATRIX = {"rows": 32, "width": 64, "group": 32, "bits": 8, "offsets": 0, "table": 0}
_ATTENTION = {
    "heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 16, "window": 0, "scale": 0.25, "softcap": 0.0
}  # fmt: skip
_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "Attention": _ATTENTION,
    "CodedAttention": _ATTENTION,
    "Linear": {**_MATRIX, "gated": 0},
    "Embedding": _MATRIX,
    "AddNorm": {"eps": 1e-5},
    "Adapted": {},
    "Experts": {
        "experts": 3,
        "hidden": 64,
        "features": 32,
        "group": 32,
        "down_group": 16,
        "bits": 8,
        "offsets": 0,
        "table": 0,
    },
    "ExpertLinear": {**_MATRIX, "experts": 3},
    "CausalConv": {"silu": 1},
    "GatedDelta": {"normalise": 1, "eps": 1e-6},
    "StateScan": {},
}
_OUTPUTS = {"Attention": ["y", "k2", "v2", "-s"],
            "CodedAttention": ["y", "k8", "v8", "-s"], "Linear": ["y", "-s"], "Embedding": ["y"], "AddNorm": ["y", "s"],
            "Adapted": ["y", "-s"], "Experts": ["y"], "ExpertLinear": ["y"],
            **{op: ["y", "after"] for op in ("CausalConv", "GatedDelta", "StateScan")}}  # fmt: skip

_HEADS = "heads of this number or size are not supported"
_ROW = "a row is outside of the tokens, the slots, the cache or the rotary tables"
_EACH = "sinks and slopes have not one number for each head"
_CACHES = "the caches have not the heads of k and v, or differ"
_TABLES = "rotary tables are wider than a head, or differ"
_TOKENS = "k and v have not the tokens of q, or not the width of their heads"
_RANK = "an input is missing, or has another number of dimensions"
_MISSING = "is marked single but has an empty string in the graph"
_WHAT = "a matrix needs rows, width, 4, 6 or 8 bits, a group that is a multiple of 8, or 16 with 6 bits"
_BIAS = "a bias has a number for each row, and a gate has none"
_SHAPES = "inputs of shapes that do not belong together"
_EXPERTS = "there are 1 to 65536 experts, of a multiple of 16 features"
_OTHERS = "panels of other matrices"
_STATES = ("CausalConv", "GatedDelta", "StateScan")
_FILTERS = "weights of shapes that do not belong to the channels"
_ORDER = "a row begins before the one before it ends"
_RANKS = "the ranks of an adapter are not among those of the matrices"
_PAIRS = "ids and shares are not of the tokens of x"
_OF_TOKENS = "ids are not of the tokens of x"
_EACH_ROW = "a bias has a number for each expert's rows"

GRAPHS = [
    *(Graph("Attention", {"heads": n}, _HEADS) for n in (0, -4, 3, 1 << 17, BIG)),
    *(Graph("Attention", {"kv_heads": n}, _HEADS) for n in (0, -1, 8, BIG)),
    *(Graph("Attention", {name: n}, _HEADS) for name in ("head_dim", "value_dim") for n in (0, -16, 513, BIG)),
    *(Graph("Attention", {"softcap": n}, _HEADS) for n in (-1.0, float("inf"), float("nan"))),
    Graph("Attention", {"head_dim": 24}, "q has not the width of its heads"),
    Graph("Attention", {"value_dim": 24}, "q has not the width of its heads"),
    Graph("Attention", {"value_dim": 24, "q": _zeros(1, 3, 144)}, _CACHES),
    Graph("Attention", _APART | {"value_dim": 24}, _TOKENS),
    *(Graph("Attention", {n: x}, _EACH) for n in ("sinks", "slopes") for x in (_zeros(3), _zeros(1, 4), _zeros(0))),
    *(Graph("Attention", {"slopes": x}, _EACH) for x in (_zeros(3, 8), _zeros(4, 8, 1))),
    *(Graph("Attention", {"slopes": _zeros(4, offsets)}, _ROW if offsets < 3 else "") for offsets in (0, 2, 3, 9)),
    *(Graph("Attention", {name: np.float32(0)}, _EACH) for name in ("sinks", "slopes")),
    *(Graph("Attention", {name: None}, "") for name in ("sinks", "slopes")),
    Graph("Attention", {"window": -1}, _HEADS),
    Graph("Attention", {"q": _zeros(1, 3, 64)}, "q has not the width of its heads"),
    Graph("Attention", {"q": _zeros(1, 3, 144)}, "q has not the width of its heads"),
    Graph("Attention", {"q": np.float32(0)}, _RANK),
    Graph("Attention", _APART | {"q": _zeros(1, 3, 128)}, "q has not the width of its heads"),
    Graph("Attention", _APART | {"k": _zeros(1, 3, 16)}, _TOKENS),
    Graph("Attention", _APART | {"v": _zeros(1, 3, 16)}, _TOKENS),
    Graph("Attention", _APART | {"k": _zeros(1, 2, 32)}, _TOKENS),
    Graph("Attention", _APART | {"v": _zeros(1, 1, 32)}, _TOKENS),
    Graph("Attention", _APART | {"k": _zeros(3, 32)}, _TOKENS),
    Graph("Attention", _APART | {"k": None}, _TOKENS),
    Graph("Attention", _APART | {"v": None}, _TOKENS),
    Graph("Attention", _APART | {"v": _zeros(0, 3, 32)}, _TOKENS),
    *(Graph("Attention", {name: _cache(2, 2, 8, 32)}, _CACHES) for name in ("past_k", "past_v")),
    *(Graph("Attention", {name: _cache(2, 1, 8, 16)}, _CACHES) for name in ("past_k", "past_v")),
    *(Graph("Attention", {name: _cache(1, 2, 8, 16)}, _CACHES) for name in ("past_v",)),
    Graph("Attention", {"past_v": _cache(2, 2, 4, 16)}, _CACHES),
    Graph("Attention", {"past_v": _cache(0, 2, 8, 16)}, _CACHES),
    Graph("Attention", {"past_k": _cache(0, 2, 8, 16), "past_v": _cache(0, 2, 8, 16)}, _ROW),
    Graph("Attention", {"past_k": _cache(2, 2, 128)}, _RANK),
    *(Graph("CodedAttention", {n: _lines(2, 2, 8, w)}, _CACHES) for n in ("past_k", "past_v") for w in (14, 17, 30)),
    *(Graph("CodedAttention", {n: _lines(2, h, 8, 16)}, _CACHES) for n in ("past_k", "past_v") for h in (1, 3)),
    Graph("CodedAttention", {"past_k": _lines(0, 2, 8, 16), "past_v": _lines(0, 2, 8, 16)}, _ROW),
    Graph("CodedAttention", {"rows": _rows((0, 6, 0, 3))}, _ROW),
    Graph("Attention", {"rows": _rows((0, 0, 0))}, "a row has not four numbers"),
    Graph("Attention", {"rows": np.zeros(4, np.int64)}, _RANK),
    *(
        Graph("Attention", {"rows": _rows(row)}, _ROW)
        for row in (
            (2, 0, 0, 1), (-1, 0, 0, 1), (BIG, 0, 0, 1), (0, 8, 0, 1), (0, 2**63 - 1, 0, 1), (0, -1, 0, 1),
            (0, 0, 3, 1), (0, 0, 2**63 - 1, 1), (0, 0, -1, 1), (0, 0, 0, 4), (0, 0, 0, 2**63 - 1), (0, 0, 0, -1),
            (0, 6, 0, 3),
        )
    ),
    Graph("Attention", {"rows": _rows((0, 0, 0, 2), (1, 0, 1, 1))}, "a row begins before the one before it ends"),
    Graph("Attention", {"cos": _zeros(8, 16), "sin": _zeros(8, 16)}, _TABLES),
    Graph("Attention", {"cos": _zeros(8, 4096), "sin": _zeros(8, 4096)}, _TABLES),
    Graph("Attention", {"cos": _zeros(64), "sin": _zeros(64)}, _TABLES),
    Graph("Attention", {"sin": _zeros(8, 4)}, _TABLES),
    Graph("Attention", {"sin": _zeros(2, 8)}, _TABLES),
    *(Graph("Attention", {name: None}, _TABLES) for name in ("cos", "sin")),
    Graph("Attention", {"cos": _zeros(2, 8), "sin": _zeros(2, 8)}, _ROW),
    Graph("Attention", {"cos": _zeros(0, 8), "sin": _zeros(0, 8)}, _ROW),
    *(Graph("Attention", {name: None}, _MISSING) for name in ("q", "past_k", "past_v", "rows")),
    *(Graph("Linear", {name: n}, _WHAT) for name in ("rows", "width") for n in (0, -1, 1 << 29, BIG)),
    *(Graph("Linear", {"group": n}, _WHAT) for n in (0, -8, 12, 1 << 15, BIG)),
    *(Graph("Linear", {"bits": n}, _WHAT) for n in (0, 5, 16)),
    *(
        Graph(op, {"d": np.array(given, np.int64)}, why)
        for op in ("Linear", "AddNorm")
        for given, why in (
            ([3], "more rows decode"), ([-1], "more rows decode"), ([BIG], "more rows decode"),
            ([], "is one number"), ([1, 1], "is one number"), (1, "is one number"),
        )
    ),
    Graph("Linear", {"d": np.array([0]), "words": np.zeros(16 * 64, np.uint16)}, ""),
    *(
        Graph("Linear", {"d": np.array([decodes]), "words": np.zeros(shape, np.uint16)}, "words of other tokens")
        for decodes, shape in ((0, 2 * 64), (0, 17 * 64), (0, 0), (2, 16 * 64), (0, (16, 64)), (0, ()))
    ),
    *(Graph("Linear", {"offsets": n}, _WHAT) for n in (3, -1, BIG)),
    *(Graph("Linear", {"table": n}, _WHAT) for n in (1, -1, BIG)),
    *(Graph("Linear", {"bits": 4, "table": n}, _WHAT) for n in (3, -1, BIG)),
    Graph("Linear", {"bits": 4, "table": 1, "offsets": 1}, _WHAT),
    Graph("Linear", {"bits": 6, "group": 8}, _WHAT),
    Graph("Linear", {"bits": 6, "offsets": 2}, _WHAT),
    *(Graph("Linear", {"gated": n}, "gated is 0, or 1 for a multiple of 32 rows") for n in (2, -1)),
    Graph("Linear", {"gated": 1, "rows": 16}, "gated is 0, or 1 for a multiple of 32 rows"),
    Graph("Linear", {"x": _zeros(2, 32)}, "x has not `width` inputs"),
    Graph("Linear", {"x": np.float32(0)}, _RANK),
    Graph("Linear", {"w": np.zeros(64, np.uint8)}, "panels of another matrix"),
    Graph("Linear", {"w": np.zeros((2, 1088), np.uint8)}, _RANK),
    Graph("Linear", {"w": np.uint8(0)}, _RANK),
    Graph("Linear", {"b": _zeros(16)}, _BIAS),
    Graph("Linear", {"b": _zeros(1, 32)}, _BIAS),
    Graph("Linear", {"b": _zeros(0)}, _BIAS),
    Graph("Linear", {"b": np.float32(0)}, _BIAS),
    Graph("Linear", {"b": _zeros(32), "gated": 1}, _BIAS),
    *(Graph("Linear", {name: None}, _MISSING) for name in ("x", "w")),
    Graph("Embedding", {"rows": BIG}, _WHAT),
    Graph("Embedding", {"w": np.zeros(64, np.uint8)}, "panels of another matrix"),
    Graph("Embedding", {"w": np.uint8(0)}, _RANK),
    *(Graph("Embedding", {"ids": np.array([[n]])}, "a token id is not in the vocabulary") for n in (32, -1, BIG)),
    Graph("Embedding", {"ids": np.zeros((1,) * 6, np.int64)}, "ids are missing, or have too many dimensions"),
    *(Graph("Embedding", {name: None}, _MISSING) for name in ("ids", "w")),
    Graph("AddNorm", {"w": _zeros(8)}, _SHAPES),
    Graph("AddNorm", {"w": _zeros(32)}, _SHAPES),
    Graph("AddNorm", {"w": np.float32(0)}, _RANK),
    Graph("AddNorm", {"x": np.float32(0), "r": np.float32(0)}, _RANK),
    Graph("AddNorm", {"r": _zeros(1, 16)}, _SHAPES),
    Graph("AddNorm", {"r": _zeros(32)}, _SHAPES),
    *(Graph("AddNorm", {name: None}, _MISSING) for name in ("x", "w")),
    *(Graph("Adapted", {"adapters": np.array([[0, n, 1]])}, "is no adapter of this number") for n in (3, -1, BIG)),
    *(Graph("Adapted", {"ends": np.array(ends)}, _RANKS) for ends in ((0, 3, 9), (-1, 3, 8), (0, 4, 3), (0, -4, BIG))),
    *(
        Graph("Adapted", {name: array}, _SHAPES)
        for name, array in (
            ("x", _zeros(1, 2, 40)), ("x", _zeros(1, 3, 0)), ("base", _zeros(1, 3, 0)), ("scales", _zeros(7)),
            ("adapters", np.zeros((1, 2), np.int64)), ("adapters", np.zeros(3, np.int64)),
            ("ends", np.zeros(0, np.int64)), ("low", np.zeros((7, 48), np.uint8)), ("low", np.zeros((8, 40), np.uint8)),
            ("high", np.zeros((8, 20), np.uint8)), ("high", np.zeros((9, 32), np.uint8)),
        )
    ),
    Graph("Adapted", {"base": np.float32(0), "x": np.float32(0)}, _RANK),
    Graph("Adapted", {"adapters": np.zeros((1,) * 6, np.int64)}, "adapters have too many dimensions"),
    *(Graph("Adapted", {name: None}, _MISSING) for name in _INPUTS["Adapted"]),
    Graph("Adapted", {"base": _zeros(1, 0, 20), "x": _zeros(1, 0, 40), "adapters": np.zeros((1, 0), np.int64)}, ""),
    Graph("Adapted", {"adapters": np.zeros((1, 3), np.int64)}, ""),
    *(Graph("Experts", {"experts": n}, _EXPERTS) for n in (0, -1, 1 << 17, BIG)),
    *(Graph("Experts", {"features": n}, _EXPERTS) for n in (0, -16, 24, 1 << 28, BIG)),
    *(Graph("Experts", {"hidden": n}, _WHAT) for n in (0, -1, 1 << 29, BIG)),
    *(Graph("Experts", {name: n}, _WHAT) for name in ("group", "down_group") for n in (0, -8, 12, 1 << 15, BIG)),
    *(Graph("Experts", {"bits": n}, _WHAT) for n in (0, 5, 16)),
    *(Graph("Experts", {"offsets": n}, _WHAT) for n in (3, -1, BIG)),
    *(Graph("Experts", {"experts": n}, _OTHERS) for n in (2, 4, 1 << 16)),
    Graph("Experts", {"features": 48}, _OTHERS),
    Graph("Experts", {"bits": 4}, _OTHERS),
    Graph("Experts", {"offsets": 1}, _OTHERS),
    *(Graph("Experts", {name: np.zeros(64, np.uint8)}, _OTHERS) for name in ("gate_up", "down")),
    *(Graph("Experts", {name: np.zeros(0, np.uint8)}, _OTHERS) for name in ("gate_up", "down")),
    *(Graph("Experts", {name: np.zeros((3, 4 * 1088), np.uint8)}, _RANK) for name in ("gate_up", "down")),
    *(Graph("Experts", {"ids": np.array([[0, 2], [1, n]])}, "there is no expert of this number") for n in (3, -1, BIG)),
    Graph("Experts", {"x": _zeros(2, 32)}, "x has not `hidden` inputs"),
    Graph("Experts", {"x": _zeros(1, 2, 64)}, _RANK),
    Graph("Experts", {"x": _zeros(3, 64)}, _PAIRS),
    Graph("Experts", {"x": _zeros(0, 64)}, _PAIRS),
    Graph("Experts", {"ids": np.zeros((2, 1), np.int64)}, _PAIRS),
    Graph("Experts", {"ids": np.zeros(2, np.int64)}, _RANK),
    Graph("Experts", {"shares": _zeros(1, 2)}, _PAIRS),
    Graph("Experts", {"shares": _zeros(2, 3)}, _PAIRS),
    Graph("Experts", {"shares": _zeros(2)}, _RANK),
    *(Graph("ExpertLinear", {"experts": n}, "there are 1 to 65536 experts") for n in (0, -1, 1 << 17, BIG)),
    *(Graph("ExpertLinear", {name: n}, _WHAT) for name in ("rows", "width") for n in (0, -1, 1 << 29, BIG)),
    *(Graph("ExpertLinear", {"experts": n}, _OTHERS) for n in (2, 4, 1 << 16)),
    *(Graph("ExpertLinear", {"w": np.zeros(n, np.uint8)}, _OTHERS) for n in (0, 64)),
    Graph("ExpertLinear", {"w": np.zeros((3, 2 * 1088), np.uint8)}, _RANK),
    *(
        Graph("ExpertLinear", {"ids": np.array([[0, 2], [1, n]])}, "there is no expert of this number")
        for n in (3, -1, BIG)
    ),
    Graph("ExpertLinear", {"x": _zeros(2, 32)}, "x has not `width` inputs"),
    *(Graph("ExpertLinear", {"x": _zeros(*shape, 64)}, _OF_TOKENS) for shape in ((), (3,), (2, 3), (2, 2, 1), (0, 2))),
    Graph("ExpertLinear", {"ids": np.zeros(2, np.int64)}, _RANK),
    *(Graph("ExpertLinear", {"b": x}, _EACH_ROW) for x in (_zeros(32), _zeros(3, 31), _zeros(2, 32), _zeros(3, 32, 1))),
    Graph("ExpertLinear", {"x": _zeros(2, 2, 64), "b": _zeros(3, 32)}, ""),
    Graph("ExpertLinear", {"x": _zeros(0, 64), "ids": np.zeros((0, 2), np.int64)}, ""),
    Graph("ExpertLinear", {"ids": np.zeros((2, 0), np.int64)}, ""),
    *(Graph("ExpertLinear", {name: None}, _MISSING) for name in ("x", "ids", "w")),
    *(Graph("Experts", {name: None}, _MISSING) for name in ("x", "ids", "shares", "gate_up", "down")),
    *(
        Graph(op, {"rows": _rows(row)}, _ROW)
        for op in _STATES
        for row in ((2, 0, 0, 3), (-1, 0, 0, 3), (0, 0, 0, 4), (0, 0, 1, 3), (0, -1, 0, 3), (0, BIG * 2 - 1, 0, 3),
                    (0, 0, -1, 3), (0, 0, 0, -1), (0, 0, BIG, 3))
    ),
    *(Graph(op, {"rows": _rows((0, 0, 1, 2), (1, 0, 0, 1))}, _ORDER) for op in _STATES),
    *(Graph(op, {"rows": _rows((0, 0, 3))}, "a row has not four numbers") for op in _STATES),
    *(Graph(op, {"state": _zeros(2, 4)}, _RANK) for op in _STATES),
    *(Graph(op, {name: None}, _MISSING) for op in _STATES for name in _INPUTS[op] if name != "b"),
    *(Graph("CausalConv", {"w": _zeros(*shape)}, _FILTERS) for shape in ((19, 4), (20, 1), (20, 65), (4, 20))),
    *(Graph("CausalConv", {"b": b}, _FILTERS) for b in (_zeros(19), _zeros(1, 20), np.float32(0))),
    *(Graph("CausalConv", {"state": _zeros(2, *shape)}, "has not the tokens and channels")
      for shape in ((4, 20), (3, 19))),
    *(Graph("GatedDelta", {"value": _zeros(1, 3, heads, 6)}, _HEADS) for heads in (1, 3)),
    Graph("GatedDelta", {name: _zeros(1, 3, 2, 1025) for name in ("query", "key")}, _HEADS),
    Graph("GatedDelta", {name: _zeros(1, 3, 0, 8) for name in ("query", "key")}, _HEADS),
    Graph("GatedDelta", {"key": _zeros(1, 3, 1, 8)}, "have not the shapes of queries and heads"),
    Graph("GatedDelta", {"beta": _zeros(1, 3, 3)}, "have not the shapes of queries and heads"),
    Graph("GatedDelta", {"decay": _zeros(1, 2, 4), "beta": _zeros(1, 2, 4)}, "have not the same tokens"),
    Graph("GatedDelta", {"value": _zeros(1, 2, 4, 6)}, "have not the same tokens"),
    *(Graph("GatedDelta", {"state": _zeros(*shape)}, "a state has not the heads")
      for shape in ((2, 3, 8, 6), (2, 4, 6, 8), (2, 4, 8, 7))),
    *(Graph("StateScan", {"x": _zeros(1, 3, heads, 6)}, _HEADS) for heads in (1, 3)),
    Graph("StateScan", {"write": _zeros(1, 3, 0, 8), "read": _zeros(1, 3, 0, 8)}, _HEADS),
    *(Graph("StateScan", {"rate": rate}, "have not the shapes of the heads")
      for rate in (_zeros(3), _zeros(4, 7), _zeros(4, 8, 1))),
    Graph("StateScan", {"read": _zeros(1, 3, 2, 7)}, "have not the shapes of the heads"),
    Graph("StateScan", {"step": _zeros(1, 3, 3)}, "have not the shapes of the heads"),
    Graph("StateScan", {"step": _zeros(1, 2, 4)}, "have not the same tokens"),
    Graph("StateScan", {"state": _zeros(2, 4, 8, 6)}, "a state has not the heads"),
    # what is empty is no error
    *(Graph(op, {"rows": np.zeros((0, 4), np.int64)}, "") for op in _STATES),
    *(Graph(op, {"rows": _rows((0, 0, 0, 0), (1, 3, 3, 0))}, "") for op in _STATES),
    Graph("Linear", {"x": _zeros(0, 64)}, ""),
    Graph("Linear", {"x": _zeros(2, 0, 64), "gated": 1}, ""),
    Graph("Embedding", {"ids": np.zeros((0, 4), np.int64)}, ""),
    Graph("AddNorm", {"x": _zeros(0, 16), "r": _zeros(0, 16)}, ""),
    Graph("AddNorm", {"x": _zeros(2, 0), "r": _zeros(2, 0), "w": _zeros(0)}, ""),
    Graph("Attention", {"q": _zeros(1, 0, 128), "rows": _rows((0, 0, 0, 0))}, ""),
    Graph("Attention", {"rows": np.zeros((0, 4), np.int64)}, ""),
    Graph("Attention", {"rows": _rows((1, 8, 3, 0), (0, 0, 3, 0))}, ""),
    Graph("Attention", {"cos": _zeros(8, 0), "sin": _zeros(8, 0)}, ""),
    Graph("Attention", {"past_k": _cache(2, 2, 0, 16), "past_v": _cache(2, 2, 0, 16)}, _ROW),
    *(Graph(op, {}, "") for op in _INPUTS),
]  # fmt: skip


def outcome(library: Path, graph: Graph) -> str:
    """The error that the graph ends in; "" for none."""
    inputs = dict(_INPUTS[graph.op])
    attributes = dict(_ATTRIBUTES[graph.op])
    for name, value in graph.change.items():
        if name in inputs:
            inputs[name] = None if value is None else np.asarray(value)
        else:
            attributes[name] = value
    try:
        run(library, graph.op, list(inputs.items()), _OUTPUTS[graph.op], **attributes)
    except Exception as e:  # noqa: BLE001 - whatever it is, the test wants to read it
        return str(e) or type(e).__name__
    return ""


def outcomes(library: Path) -> Iterator[tuple[int, str | None]]:
    """Each graph's place, before it runs with None and then with what came of it."""
    for index, graph in enumerate(GRAPHS):
        yield index, None
        yield index, outcome(library, graph)


if __name__ == "__main__":
    for reported in outcomes(Path(sys.argv[1])):
        print(json.dumps(reported), flush=True)
