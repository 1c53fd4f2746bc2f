"""Lowering in parts: weights and their recipes, fusing, position tables, ONNX, and packing."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend.skeleton import model_config
from llmc.compiler.frontend.trace import trace
from llmc.compiler.program.fuse import (
    fuse,
    fuse_attention,
    fuse_gate_up,
    fuse_qkv,
    fuse_residual,
    fuse_rms_norm,
    narrow_last_rows,
)
from llmc.compiler.program.import_fx import import_program
from llmc.compiler.program.ir import Graph, Value
from llmc.compiler.targets.onnxruntime.formats import OnnxOptions
from llmc.compiler.targets.onnxruntime.onnx_model import bind, load_model, set_placements
from llmc.compiler.targets.onnxruntime.packing import pack_weights
from llmc.compiler.targets.onnxruntime.to_onnx import OnnxGraph, to_onnx
from llmc.compiler.weights.recipes import (
    ALIGNMENT,
    Placement,
    Recipe,
    quantise_q8,
    to_bf16,
    write_weights,
)
from llmc.errors import CheckpointError, CompileError
from llmc.runtime.executors.onnxruntime.session import open_session
from tests.compiler import tiny
from tests.compiler.targets.onnxruntime.sketch import Sketch, by_onnx, by_torch
from tests.tiers import default_cases, examples

Array = NDArray[np.float32]


# Eight bits: scale = largest / −128, w ≈ scale · (q − 128)


def dequantised(data: NDArray[np.uint8], scales: Array) -> Array:
    return ((data.astype(np.float32) - 128) * scales[..., None]).reshape(len(data), -1)


def random_matrix(rows: int, width: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0, 0.3, (rows, width)).astype(np.float32)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_eight_bits_are_half_a_step_off_at_most_in_every_block(block: int) -> None:
    weight = random_matrix(40, 128)
    data, scales = quantise_q8(weight, block)
    assert (data.shape, scales.shape) == ((40, 128 // block, block), (40, 128 // block))
    assert (data.dtype, scales.dtype) == (np.uint8, np.float32)
    error = np.abs(dequantised(data, scales) - weight).reshape(data.shape)
    allowed = np.where(data == 255, 1.0, 0.5)  # the last step also takes what would be one more
    assert (error <= np.abs(scales)[..., None] * allowed * 1.0001).all()
    largest = np.abs(weight).reshape(data.shape).max(-1)
    np.testing.assert_allclose(np.abs(scales), largest / 128, rtol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_value_of_largest_magnitude_is_exact(sign: int) -> None:
    weight = random_matrix(50, 64, seed=1)
    weight[:, 5] = sign * (np.abs(weight).max(1) + np.float32(0.01))
    assert (dequantised(*quantise_q8(weight, 64))[:, 5] == weight[:, 5]).all()


def test_the_largest_with_the_other_sign_is_clipped_to_the_last_step() -> None:
    weight = np.zeros((1, 32), np.float32)
    weight[0, :3] = [1.0, -1.0, 0.5]
    data, scales = quantise_q8(weight, 32)
    assert scales[0, 0] in (np.float32(1 / 128), np.float32(-1 / 128))
    back = dequantised(data, scales)[0, :3]
    assert sorted(np.abs(back[:2])) == [127 / 128, 1.0] and back[0] > 0 > back[1]
    assert back[2] == 0.5


def test_inputs_that_do_not_fill_a_block_are_padded_with_zeros() -> None:
    weight = random_matrix(6, 40)
    data, scales = quantise_q8(weight, 32)
    assert data.shape == (6, 2, 32)
    assert (data[:, 1, 8:] == 128).all(), "128 stands for zero"
    wide, wide_scales = quantise_q8(np.pad(weight, ((0, 0), (0, 24))), 32)
    assert (wide == data).all() and (wide_scales == scales).all()


def test_blocks_of_nothing_stay_nothing() -> None:
    weight = np.zeros((2, 64), np.float32)
    weight[1, 0] = 2
    data, scales = quantise_q8(weight, 32)
    assert (data[0] == 128).all() and (scales[0] == 0).all()
    assert (dequantised(data, scales) == weight).all()


def test_blocks_too_small_for_a_scale_become_zero() -> None:
    """Numbers near the least that float32 holds, whose reciprocals it does not hold."""
    weight = np.full((1, 32), 1e-41, np.float32)
    weight[0, 3:] = 0
    back = dequantised(*quantise_q8(weight, 32))
    assert np.isfinite(back).all()
    assert np.abs(back - weight).max() < 1e-36


@examples(60)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=70),
    st.sampled_from([16, 32]),
)
@example(values=[1.4e-36], block=32)
def test_any_numbers_are_a_step_off_at_most(values: list[float], block: int) -> None:
    """Or as much as the largest block that becomes zero."""
    weight = np.array([values], np.float32)
    data, scales = quantise_q8(weight, block)
    error = np.abs(dequantised(data, scales)[:, : len(values)] - weight)
    steps = np.repeat(np.abs(scales), block, -1)[:, : len(values)]
    assert (error <= np.maximum(steps * 1.0001, 128 * np.finfo(np.float32).tiny)).all()


# The weights file


class Tensors:
    """A source of tensors, which counts how often each is read."""

    def __init__(self, **tensors: Array) -> None:
        self.held = {name.replace("__", "."): t for name, t in tensors.items()}
        self.read: list[str] = []

    def tensor_names(self) -> Sequence[str]:
        return list(self.held)

    def tensor(self, name: str) -> Array:
        self.read.append(name)
        return self.held[name]


def written(recipes: list[Recipe], source: Tensors, **tables: Array) -> tuple[bytes, dict[str, Placement]]:
    out = io.BytesIO()
    placed = write_weights(recipes, source, tables, out)
    return out.getvalue(), placed


def content(data: bytes, at: Placement) -> bytes:
    return data[at.offset : at.offset + at.length]


def test_each_transform_writes_what_it_says() -> None:
    a, b = random_matrix(3, 32, seed=1), random_matrix(5, 32, seed=2)
    source, table = Tensors(a=a, b=b), random_matrix(4, 4)
    both = ("a", "b")
    recipes = [
        Recipe("dense", "dense", both),
        Recipe("bf16", "bf16", both),
        Recipe("transposed", "transposed", both),
        Recipe("data", "q8_data", both, 16),
        Recipe("scales", "q8_scales", both, 16),
        Recipe("table", "table", ()),
    ]
    data, placed = written(recipes, source, table=table)
    joined = np.concatenate([a, b])
    quantized, scales = quantise_q8(joined, 16)
    expected = {
        "dense": joined,
        "bf16": to_bf16(joined),
        "transposed": np.ascontiguousarray(joined.T),
        "data": quantized,
        "scales": scales,
        "table": table,
    }
    for name, array in expected.items():
        assert content(data, placed[name]) == array.tobytes(), name
    rows, at = written([Recipe("rows", "q8_rows", both, 16)], source)
    assert content(rows, at["rows"]) == quantized.reshape(8, 32).tobytes()


def test_tensors_start_at_pages_and_equal_content_is_stored_once() -> None:
    source = Tensors(a=random_matrix(3, 7, seed=1), b=random_matrix(300, 5, seed=2), c=random_matrix(3, 7, seed=1))
    recipes = [Recipe(name, "dense", (name,)) for name in "abc"] + [Recipe("d", "dense", ("b",))]
    data, placed = written(recipes, source)
    assert placed["a"] == placed["c"] and placed["b"] == placed["d"]
    assert [placed[n].offset for n in "ab"] == [0, ALIGNMENT]
    assert all(at.offset % ALIGNMENT == 0 for at in placed.values())
    assert len(data) == ALIGNMENT + 300 * 5 * 4, "nothing after the last tensor"
    assert data[3 * 7 * 4 : ALIGNMENT] == b"\0" * (ALIGNMENT - 3 * 7 * 4)


def test_the_same_recipes_write_the_same_bytes() -> None:
    def once() -> tuple[bytes, dict[str, Placement]]:
        source = Tensors(a=random_matrix(9, 64))
        return written([Recipe("a.q8", "q8_data", ("a",), 64), Recipe("a.s", "q8_scales", ("a",), 64)], source)

    assert once() == once()


def test_data_and_scales_of_one_matrix_quantise_it_once() -> None:
    source = Tensors(a=random_matrix(9, 64))
    written([Recipe("a.q8", "q8_data", ("a",), 64), Recipe("a.s", "q8_scales", ("a",), 64)], source)
    assert source.read == ["a"]


def test_a_tied_head_is_read_from_the_embedding_and_stored_once() -> None:
    source = Tensors(model__embed_tokens__weight=random_matrix(20, 32))
    names = ("model.embed_tokens.weight", "lm_head.weight")
    recipes = [Recipe(f"{n}.q8", "q8_data", (n,), 32) for n in names]
    recipes += [Recipe("rows", "q8_rows", (names[0],), 32)]
    data, placed = written(recipes, source)
    assert len(set(placed.values())) == 1
    assert len(data) == 20 * 32


def test_a_tensor_that_is_missing_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"has no tensor 'model\.norm\.weight', which its architecture needs"):
        written([Recipe("n", "dense", ("model.norm.weight",))], Tensors(other=random_matrix(1, 1)))
    with pytest.raises(CheckpointError, match=r"has no tensor 'model\.embed_tokens\.weight'"):
        written([Recipe("h", "dense", ("lm_head.weight",))], Tensors(other=random_matrix(1, 1)))


def test_recipes_survive_json() -> None:
    recipe = Recipe("name", "q8_data", ("a", "b"), 64)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


# Graphs by hand


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def replay(graph: Graph, **inputs: NDArray[Any]) -> list[Array]:
    """The outputs of a graph, in numpy; weights follow from their names."""
    values: dict[Value, NDArray[Any]] = {v: inputs[name] for name, v in graph.inputs.items()}
    for v, name in graph.weights.items():
        seed = sum(name.encode())
        values[v] = np.random.default_rng(seed).normal(0, 0.5, [int(d) for d in v.shape])

    def rms(x: NDArray[Any], weight: NDArray[Any], eps: float) -> NDArray[Any]:
        return weight * (x / np.sqrt((x**2).mean(-1, keepdims=True) + eps))

    for node in graph.nodes:
        given = [values[v] for v in node.inputs if v is not None]
        attrs = node.attrs
        match node.op:
            case "linear":
                count = len(attrs.get("parts", [0]))
                built = [given[0] @ np.concatenate(given[1 : 1 + count]).T]
                if len(given) > 1 + count:
                    built[0] = built[0] + np.concatenate(given[1 + count :])
            case "add":
                built = [given[0] + attrs.get("alpha", 1) * (given[1] if len(given) > 1 else attrs["other"])]
            case "mul":
                built = [given[0] * given[1]]
            case "pow":
                built = [given[0] ** attrs["exponent"]]
            case "mean":
                built = [given[0].mean(tuple(attrs["dim"]), keepdims=True)]
            case "rsqrt":
                built = [1 / np.sqrt(given[0])]
            case "silu":
                built = [given[0] / (1 + np.exp(-given[0]))]
            case "split":
                built = np.split(given[0], np.cumsum(attrs["parts"])[:-1], -1)
            case "last_rows":
                built = [given[0][np.arange(len(given[0])), given[1] - 1]]
            case "rms_norm":
                built = [rms(*given, attrs["eps"])]
            case "skip_rms_norm":
                built = [rms(given[0] + given[1], given[2], attrs["eps"]), given[0] + given[1]]
            case _:
                raise NotImplementedError(node.op)
        values |= dict(zip(node.outputs, built, strict=True))
    return [values[v] for _, v in graph.outputs]


X = np.random.default_rng(7).normal(0, 1, (3, 4, 8))
LENGTHS = np.array([4, 1, 2])


# rms_norm


@pytest.mark.parametrize("turned", [False, True])
def test_a_root_mean_square_is_fused_whatever_the_order_of_factors(turned: bool) -> None:
    s = Sketch()
    x = s.input("x", "B", "Q", 8)
    graph = s.done(s.norm(x, s.weight("w", 8), turned=turned))
    before = replay(graph, x=X)
    fuse_rms_norm(graph)
    graph.prune()
    assert ops(graph) == ["rms_norm"]
    assert graph.nodes[0].inputs[0] is x
    assert graph.nodes[0].attrs == {"eps": 1e-5}
    np.testing.assert_allclose(replay(graph, x=X)[0], before[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"squared": "y"},
        {"dim": [1]},
        {"dim": [-1, -2]},
        {"exponent": 3},
        {"root": "sqrt"},
        {"eps": "y"},
    ],
    ids=str,
)
def test_what_only_looks_like_a_root_mean_square_is_left_alone(changes: dict[str, Any]) -> None:
    s = Sketch()
    x, y = s.input("x", "B", "Q", 8), s.input("y", "B", "Q", 8)
    changes = {name: y if value == "y" else value for name, value in changes.items()}
    graph = s.done(s.norm(x, s.weight("w", 8), **changes))
    before = graph.text()
    fuse_rms_norm(graph)
    assert graph.text() == before


def test_a_weight_that_is_one_more_is_a_weight() -> None:
    s = Sketch()
    x = s.input("x", "B", "Q", 8)
    raised = s.add(s.weight("w", 8), other=1.0)
    graph = s.done(s.norm(x, raised))
    before = replay(graph, x=X)
    fuse_rms_norm(graph)
    graph.prune()
    assert ops(graph) == ["add", "rms_norm"] and graph.nodes[1].inputs == [x, raised]
    np.testing.assert_allclose(replay(graph, x=X)[0], before[0])


def test_a_factor_that_is_no_weight_vector_is_left_alone() -> None:
    s = Sketch()
    x = s.input("x", "B", "Q", 8)
    graph = s.done(s.norm(x, s.weight("matrix", 8, 8)), s.norm(x, s.input("y", "B", "Q", 8)))
    before = graph.text()
    fuse_rms_norm(graph)
    assert graph.text() == before


@pytest.mark.parametrize("read_twice", [False, True])
def test_heads_are_normed_before_they_are_turned_to_their_own_axis(read_twice: bool) -> None:
    s = Sketch()
    x = s.input("x", "B", "Q", 2, 8)
    turned = s.transpose(x, dim0=1, dim1=2, shape=("B", 2, "Q", 8))
    normed = s.norm(turned, s.weight("w", 8))
    graph = s.done(normed, *([turned] if read_twice else []))
    feed = {"x": np.random.default_rng(4).normal(0, 1, (3, 4, 2, 8)).astype(np.float32)}
    wanted = by_torch(graph, feed)
    fuse(graph)
    assert ops(graph) == (["transpose", "rms_norm"] if read_twice else ["rms_norm", "transpose"])
    for got, exact in zip(by_onnx(graph, feed), wanted, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)


# Residuals


def test_a_norm_of_a_sum_yields_the_sum_as_well() -> None:
    s = Sketch()
    x, y = s.input("x", "B", "Q", 8), s.input("y", "B", "Q", 8)
    total = s.add(x, y)
    graph = s.done(s.rms_norm(total, s.weight("w", 8), eps=1e-5), s.linear(total, s.weight("v", 5, 8)))
    before = replay(graph, x=X, y=X[::-1])
    fuse_residual(graph)
    graph.prune()
    assert ops(graph) == ["skip_rms_norm", "linear"]
    for wanted, got in zip(before, replay(graph, x=X, y=X[::-1]), strict=True):
        np.testing.assert_allclose(got, wanted)


def test_two_norms_of_one_sum_are_fused_once() -> None:
    s = Sketch()
    x, y = s.input("x", "B", "Q", 8), s.input("y", "B", "Q", 8)
    total = s.add(x, y)
    graph = s.done(*(s.rms_norm(total, s.weight(name, 8), eps=1e-5) for name in "vw"))
    before = replay(graph, x=X, y=X[::-1])
    fuse_residual(graph)
    assert sorted(ops(graph)) == ["rms_norm", "skip_rms_norm"]
    for wanted, got in zip(before, replay(graph, x=X, y=X[::-1]), strict=True):
        np.testing.assert_allclose(got, wanted)


def test_other_sums_are_left_alone() -> None:
    s = Sketch()
    x, y, row = s.input("x", "B", "Q", 8), s.input("y", "B", "Q", 8), s.input("row", 1, "Q", 8)
    sums = [s.add(x, y, alpha=2), s.add(x, row), s.add(x, other=1.0)]
    graph = s.done(*(s.rms_norm(total, s.weight(f"w{i}", 8), eps=1e-5) for i, total in enumerate(sums)))
    before = graph.text()
    fuse_residual(graph)
    assert graph.text() == before


# Gate and up


def gated(s: Sketch, **changes: Any) -> Graph:
    x, other = s.input("x", "B", "Q", 8), s.input("other", "B", "Q", 8)
    biases = (s.weight("bias.gate", 6), s.weight("bias.up", 6)) if "biases" in changes else (None, None)
    if "one bias" in changes:
        biases = (s.weight("bias.gate", 6), None)
    linears = [
        lambda: s.linear(x, s.weight("gate", 6, 8), biases[0]),
        lambda: s.linear(other if "other input" in changes else x, s.weight("up", 6, 8), biases[1]),
    ]
    if "up first" in changes:
        up, gate = linears[1](), linears[0]()
    else:
        gate, up = linears[0](), linears[1]()
    outputs = [s.mul(getattr(s, changes.get("act", "silu"))(gate), up)]
    if "read twice" in changes:
        outputs.append(up)
    return s.done(*outputs)


@pytest.mark.parametrize("change", ["", "biases", "up first"])
def test_gate_and_up_become_one_matrix(change: str) -> None:
    graph = gated(Sketch(), **{change: True})
    before = replay(graph, x=X, other=X)
    fuse_gate_up(graph)
    graph.prune()
    assert ops(graph) == ["linear", "split", "silu", "mul"]
    assert graph.nodes[0].attrs["parts"] == [6, 6]
    assert [graph.weights[w] for w in graph.nodes[0].inputs[1:3] if w] == ["gate", "up"]
    np.testing.assert_allclose(replay(graph, x=X, other=X)[0], before[0])


@pytest.mark.parametrize("change", ["other input", "read twice", "one bias"])
def test_gates_that_cannot_share_a_matrix_keep_their_own(change: str) -> None:
    graph = gated(Sketch(), **{change: True})
    before = graph.text()
    fuse_gate_up(graph)
    assert graph.text() == before


def test_another_activation_is_left_alone() -> None:
    graph = gated(Sketch(), act="relu")
    before = graph.text()
    fuse_gate_up(graph)
    assert graph.text() == before


# Attention with rotary embedding, and its packed input

HEADS, KV_HEADS, HEAD_DIM, POSITIONS = 4, 2, 16, 16


def angles(seed: int = 0, halves_alike: bool = True) -> Array:
    half = random_matrix(POSITIONS, HEAD_DIM // 2, seed)
    return np.concatenate([half, half if halves_alike else half + 1], 1)


class Attention(Sketch):
    """An attention layer by hand; each change makes it another arithmetic."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.changes = changes
        self.x, self.other = self.input("x", "B", "Q", 32), self.input("other", "B", "Q", 32)
        self.ids = self.input("token_ids", "B", "Q", dtype="int64")
        self.past = self.input("past_lengths", "B", dtype="int64")
        cache_ = [self.input(f"past_{n}0", "B", KV_HEADS, "S", HEAD_DIM) for n in "kv"]
        alike = "halves differ" not in changes
        self.cos = self.positions("cos", angles(1, alike))
        self.sin = self.positions("sin", angles(2, alike))
        value_input = self.other if "value of another input" in changes else self.x
        bias = self.weight("bias.q", HEADS * HEAD_DIM) if "bias on one" in changes else None
        q = self.heads(self.linear(self.x, self.weight("q", HEADS * HEAD_DIM, 32), bias), HEADS)
        k = self.heads(self.linear(self.x, self.weight("k", KV_HEADS * HEAD_DIM, 32)), KV_HEADS)
        flat_v = self.linear(value_input, self.weight("v", KV_HEADS * HEAD_DIM, 32))
        v = self.heads(flat_v, KV_HEADS)
        if "queries of no view" in changes:
            q = self.relu(q)
        if "no rotary" not in changes:
            q = self.turned(q, self.cos)
            k = self.turned(k, self.positions("cos2", angles(3)) if "two angles" in changes else self.cos)
        built = self.node(
            "attention", q, k, v, *cache_, self.past, None, scale=0.35, softcap=0.0, window=-1,
            shapes=[("B", "Q", HEADS, HEAD_DIM), cache_[0].shape, cache_[1].shape],
        )  # fmt: skip
        flat = self.reshape(built.out, shape=("B", "Q", HEADS * HEAD_DIM))
        outputs = [flat, *built.outputs[1:]]
        if "value read twice" in changes:
            outputs.append(flat_v)
        self.done(*outputs)

    def positions(self, name: str, array: Array) -> Value:
        table = self.table(name, array)
        return self.position_table(table, self.past, self.ids, shape=("B", 1, "Q", HEAD_DIM))

    def heads(self, x: Value, count: int) -> Value:
        viewed = self.view(x, shape=("B", "Q", count, HEAD_DIM))
        return self.transpose(viewed, dim0=1, dim1=2, shape=("B", count, "Q", HEAD_DIM))

    def turned(self, x: Value, cos: Value) -> Value:
        half = HEAD_DIM // 2 if "quarters" not in self.changes else HEAD_DIM // 4
        lower = self.slice(x, dim=3, start=0, end=half, shape=(*x.shape[:3], half))
        upper = self.slice(x, dim=3, start=half, end=2**63 - 1, shape=(*x.shape[:3], HEAD_DIM - half))
        if "swapped halves" in self.changes:
            rotated = self.cat(upper, self.neg(lower), dim=-1, shape=x.shape)
        elif "nothing negated" in self.changes:
            rotated = self.cat(upper, lower, dim=-1, shape=x.shape)
        else:
            rotated = self.cat(self.neg(upper), lower, dim=-1, shape=x.shape)
        return self.add(self.mul(x, cos), self.mul(rotated, self.sin))


def attention_feed() -> dict[str, NDArray[Any]]:
    """Three tokens over a past of five, in a cache that they fill."""
    random = np.random.default_rng(5)
    caches = {f"past_{n}0": random.normal(0, 1, (1, KV_HEADS, 8, HEAD_DIM)).astype(np.float32) for n in "kv"}
    inputs = {name: random.normal(0, 1, (1, 3, 32)).astype(np.float32) for name in ("x", "other")}
    return {**inputs, **caches, "token_ids": np.ones((1, 3), np.int64), "past_lengths": np.array([5])}


def fused_attention(**changes: Any) -> Graph:
    graph = Attention(**changes).graph
    fuse_attention(graph)
    graph.prune()
    return graph


def test_rotary_embedding_cache_and_attention_become_one_operator() -> None:
    graph = fused_attention()
    assert ops(graph) == ["linear", "linear", "linear", "gqa"]
    gqa = graph.nodes[-1]
    assert gqa.attrs == {
        "scale": 0.35, "softcap": 0.0, "window": -1, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM,
    }  # fmt: skip
    cos, sin = gqa.inputs[6:]
    assert cos is not None and sin is not None
    assert (graph.tables[cos] == angles(1)[:, : HEAD_DIM // 2]).all()
    assert (graph.tables[sin] == angles(2)[:, : HEAD_DIM // 2]).all()
    assert graph.outputs[0][1] is gqa.out and gqa.out.shape == ("B", "Q", HEADS * HEAD_DIM)


def test_attention_without_rotary_embedding_is_fused_without_tables() -> None:
    graph = fused_attention(**{"no rotary": True})
    assert ops(graph) == ["linear", "linear", "linear", "gqa"]
    assert graph.nodes[-1].inputs[6:] == [None, None]
    assert graph.tables == {}


@pytest.mark.parametrize("change", ["swapped halves", "nothing negated", "quarters", "two angles", "halves differ"])
def test_other_rotations_run_as_they_are_written(change: str) -> None:
    """Beside an attention that takes turned queries and keys; numbers are those of ATen's own operators."""
    feed = attention_feed()
    wanted = by_torch(Attention(**{change: True}).graph, feed)
    graph = fused_attention(**{change: True})
    (gqa,) = (node for node in graph.nodes if node.op == "gqa")
    assert gqa.inputs[6:] == [None, None]
    for got, exact in zip(by_onnx(graph, feed), wanted, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["", "queries of no view"])
def test_the_fused_rotation_gives_the_numbers_of_the_plain_one(change: str) -> None:
    feed = attention_feed()
    wanted = by_torch(Attention(**{change: True}).graph, feed)
    graph = fused_attention(**{change: True})
    assert "cat" not in ops(graph)
    for got, exact in zip(by_onnx(graph, feed), wanted, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


def test_query_key_and_value_become_one_matrix() -> None:
    graph = fused_attention()
    fuse_qkv(graph)
    graph.prune()
    assert ops(graph) == ["linear", "gqa"]
    packed, gqa = graph.nodes
    assert packed.attrs["parts"] == [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    assert [graph.weights[w] for w in packed.inputs[1:] if w] == ["q", "k", "v"]
    assert gqa.inputs[:3] == [packed.out, None, None]


@pytest.mark.parametrize("change", ["value of another input", "value read twice", "bias on one"])
def test_projections_that_cannot_share_a_matrix_keep_their_own(change: str) -> None:
    graph = fused_attention(**{change: True})
    before = graph.text()
    fuse_qkv(graph)
    assert graph.text() == before


# The last rows


def last_row_graph(kept: bool = False, mixed: bool = False) -> Graph:
    s = Sketch()
    x, lengths = s.input("x", "B", "Q", 8), s.input("lengths", "B", dtype="int64")
    hidden = s.linear(x, s.weight("o", 8, 8))
    total = s.add(x, hidden)
    if mixed:
        total = s.mix_tokens(total)
    normed = s.rms_norm(total, s.weight("w", 8), eps=1e-5)
    last = s.last_rows(normed, lengths, shape=("B", 8))
    return s.done(s.linear(last, s.weight("head", 11, 8)), *([total] if kept else []))


def test_row_wise_operators_run_on_the_last_rows_only() -> None:
    graph = last_row_graph()
    before = replay(graph, x=X, lengths=LENGTHS)
    narrow_last_rows(graph)
    graph.prune()
    assert ops(graph) == ["last_rows", "linear", "add", "rms_norm", "linear"]
    assert all(len(node.out.shape) == 2 for node in graph.nodes)
    np.testing.assert_allclose(replay(graph, x=X, lengths=LENGTHS)[0], before[0])


def test_what_something_else_reads_keeps_all_rows() -> None:
    graph = last_row_graph(kept=True)
    before = replay(graph, x=X, lengths=LENGTHS)
    narrow_last_rows(graph)
    graph.prune()
    assert ops(graph) == ["linear", "add", "last_rows", "rms_norm", "linear"]
    for wanted, got in zip(before, replay(graph, x=X, lengths=LENGTHS), strict=True):
        np.testing.assert_allclose(got, wanted)


def test_an_operator_that_mixes_tokens_sees_all_of_them() -> None:
    graph = last_row_graph(mixed=True)
    narrow_last_rows(graph)
    graph.prune()
    assert ops(graph) == ["linear", "add", "mix_tokens", "last_rows", "rms_norm", "linear"]


def test_a_graph_without_last_rows_is_left_alone() -> None:
    s = Sketch()
    graph = s.done(s.linear(s.input("x", "B", "Q", 8), s.weight("o", 8, 8)))
    before = graph.text()
    narrow_last_rows(graph)
    assert graph.text() == before


# From a traced program: tables of positions


@cache
def imported(case: str, positions: int = 32) -> Graph:
    return import_program(trace(tiny.config(case), "fused"), positions)


@default_cases(1)
@pytest.mark.parametrize("case", ["llama", tiny.TIED, "llama-one-kv-head-linear-rope"])
def test_rotary_angles_become_tables_that_all_layers_share(case: str) -> None:
    """Plain, llama3-scaled and linearly scaled angles, as transformers computes them."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    graph = imported(case)
    assert len(graph.tables) == 2
    rotary = LlamaRotaryEmbedding(model_config(tiny.config(case)))
    wanted = rotary(torch.zeros(1), torch.arange(32)[None])
    for table, exact in zip(graph.tables.values(), wanted, strict=True):
        np.testing.assert_array_equal(table, exact[0].numpy())
    assert sum(node.op == "position_table" for node in graph.nodes) == 2


def test_tables_are_as_long_as_requested() -> None:
    assert {t.shape[0] for t in imported("llama", 7).tables.values()} == {7}


def test_an_imported_program_has_the_contracts_inputs_and_outputs_and_no_leftovers() -> None:
    graph = imported("llama")
    caches = [f"past_{n}{layer}" for layer in range(2) for n in "kv"]
    assert list(graph.inputs) == ["token_ids", "past_lengths", "new_lengths", *caches]
    assert [name for name, _ in graph.outputs] == ["logits", *(c.replace("past", "present") for c in caches)]
    assert {d for v in graph.inputs.values() for d in v.shape if isinstance(d, str)} == {"B", "Q", "S"}
    assert not {"to", "_to_copy", "detach", "sym_size", "expand"} & set(ops(graph))
    assert set(graph.weights.values()) == {name for name, _ in tiny.model("llama").named_parameters()}


# To ONNX


def test_an_operator_without_an_onnx_form_is_named() -> None:
    s = Sketch()
    x = s.input("x", "B", "Q", 8)
    with pytest.raises(CompileError, match=r"operator 'erfinv' has no ONNX lowering \(at %erfinv_1_0\)"):
        to_onnx(s.done(s.erfinv(x)), OnnxOptions(0))


def test_blocks_divide_the_inputs_where_they_can() -> None:
    options = OnnxOptions(64)
    assert [options.block_for(width) for width in (576, 64, 96, 1536, 80, 100)] == [64, 64, 32, 64, 16, 32]
    assert OnnxOptions(32).block_for(576) == 32


@cache
def lowered(block: int) -> OnnxGraph:
    return to_onnx(fuse(import_program(trace(tiny.config("llama"), "fused"), 32)), OnnxOptions(block))


@pytest.mark.parametrize("block", [0, 64])
def test_a_lowered_model_holds_no_weights_and_short_names(block: int) -> None:
    model = lowered(block).model
    outside = [t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    assert {t.name for t in outside} == {r.name for r in lowered(block).recipes}
    assert set(lowered(block).tables) == {r.name for r in lowered(block).recipes if r.transform == "table"}
    assert len(model.SerializeToString()) < 10_000
    interface = {v.name for v in (*model.graph.input, *model.graph.output)}
    names = {n for node in model.graph.node for n in (*node.input, *node.output)} - interface
    assert max(map(len, names)) < 16


def test_a_lowered_model_takes_the_tokens_whose_logits_are_wanted() -> None:
    """As many as asked for, not one a row; what else the program's contract takes and gives stays."""
    graph = imported("llama")
    interface = sizes(lowered(0).model)
    assert set(interface) == {*graph.inputs, *(name for name, _ in graph.outputs), "logit_rows"} - {"new_lengths"}
    assert interface["logit_rows"] == ["R"] and interface["logits"] == ["R", 257]


def test_row_wise_operators_see_only_the_tokens_that_are_requested() -> None:
    """The last layer's matrices behind attention, too: a prompt step pays for one token of them."""
    nodes = lowered(0).model.graph.node
    chosen = [i for i, node in enumerate(nodes) if "logit_rows" in node.input]
    last_attention = max(i for i, node in enumerate(nodes) if node.op_type == "GroupQueryAttention")
    assert len(chosen) == 2 and chosen[0] > last_attention, "what attention gives, and the residual"
    assert all(node.op_type not in ("MatMul", "Gemm") for node in nodes[last_attention : chosen[0]])


def sizes(model: Any) -> dict[str, list[int | str]]:
    dims = {v.name: v.type.tensor_type.shape.dim for v in (*model.graph.input, *model.graph.output)}
    return {name: [d.dim_param or d.dim_value for d in dim] for name, dim in dims.items()}


def test_binding_fixes_the_named_sizes_in_a_copy() -> None:
    model = lowered(0).model
    before = model.SerializeToString(deterministic=True)
    bound = sizes(bind(model, {"B": 3, "Q": 5, "R": 4}))
    assert model.SerializeToString(deterministic=True) == before
    assert bound["token_ids"] == [3, 5] and bound["past_lengths"] == [3] and bound["logit_rows"] == [4]
    assert bound["past_k0"] == bound["present_v1"] == [3, 2, "S", 16]
    assert bound["logits"] == [4, 257]
    assert sizes(bind(model, {"S": 9}))["past_k0"] == ["B", 2, 9, 16]
    assert sizes(bind(model, {})) == sizes(model)


def test_placing_points_every_outside_tensor_at_its_bytes_in_a_copy() -> None:
    model = lowered(64).model
    before = model.SerializeToString(deterministic=True)
    offsets = {r.name: {"offset": 4096 * i, "length": i, "extra": "x"} for i, r in enumerate(lowered(64).recipes)}
    placed = set_placements(model, "file", offsets)
    assert model.SerializeToString(deterministic=True) == before
    for tensor in placed.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            entries = {e.key: e.value for e in tensor.external_data}
            assert entries == {"location": "file"} | {k: str(v) for k, v in offsets[tensor.name].items()}


# Packed weights


class Packing:
    """A tiny model's plain and packed weights."""

    def __init__(self, folder: Path, block: int) -> None:
        model = open_checkpoint(tiny.write_model(folder / "model", "llama"))
        self.lowered = lowered(block)
        self.plain = folder / "plain"
        with self.plain.open("wb") as out:
            placed = write_weights(self.lowered.recipes, model, self.lowered.tables, out)
        self.placements = {n: {"offset": p.offset, "length": p.length} for n, p in placed.items()}
        (folder / "work").mkdir()
        data = self.lowered.model.SerializeToString()
        self.packed, self.moved = pack_weights(data, self.plain, self.placements, folder / "work")

    def run(self, weights: Path, placements: dict[str, dict[str, Any]]) -> list[Array]:
        """Outputs of two ragged rows over a past."""
        model = set_placements(self.lowered.model, weights.name, placements).SerializeToString()
        folder = {"session__model_external_initializers_file_folder_path": str(weights.parent)}
        session = open_session(model, **folder)
        random = np.random.default_rng(2)
        feed: dict[str, NDArray[Any]] = {
            "token_ids": random.integers(0, 257, (2, 1)),
            "past_lengths": np.array([4, 2]),
            "logit_rows": np.array([0, 1]),
        }
        for layer in range(2):
            for n in "kv":
                feed[f"past_{n}{layer}"] = random.normal(0, 1, (2, 2, 8, 16)).astype(np.float32)
        outputs: list[Array] = session.run(None, feed)
        return outputs


@pytest.fixture(scope="module", params=[0, 64], ids=["f32", "int8"])
def packing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packing:
    return Packing(tmp_path_factory.mktemp("packing"), request.param)


def blobs(packing: Packing) -> list[tuple[int, int]]:
    """(offset, length) of every packed copy."""
    found = []
    for placement in packing.moved.values():
        for key, entry in placement.items():
            if key.startswith("prepacked"):
                found += [tuple(map(int, blob.split(";")[:2])) for blob in entry.split("|")[1:]]
    return found  # type: ignore[return-value]


def test_packed_copies_follow_the_plain_weights_at_pages_of_their_own(packing: Packing) -> None:
    plain, packed = packing.plain.read_bytes(), packing.packed.read_bytes()
    assert packed.startswith(plain), "so that placements stay valid"
    for name, at in packing.placements.items():
        assert {k: packing.moved[name][k] for k in at} == at
    offsets = sorted(blobs(packing))
    assert offsets
    end = len(plain)
    for offset, length in offsets:
        assert offset >= end and offset % ALIGNMENT == 0 and length > 0
        end = offset + length
    assert end == len(packed)


def test_a_packed_model_computes_the_very_same(packing: Packing) -> None:
    wanted = packing.run(packing.plain, packing.placements)
    got = packing.run(packing.packed, packing.moved)
    for w, g in zip(wanted, got, strict=True):
        np.testing.assert_array_equal(g, w)
    assert np.ptp(wanted[0]) > 0.1


def test_it_is_the_packed_copies_that_are_run(packing: Packing, tmp_path: Path) -> None:
    """Other bytes in them are other numbers, or are seen: from 1.32 on ONNX Runtime compares them with its own."""
    data = bytearray(packing.packed.read_bytes())
    for offset, length in blobs(packing):
        data[offset : offset + length] = bytes(length)
    blank = tmp_path / "blank"
    blank.write_bytes(data)
    try:
        got = packing.run(blank, packing.moved)
    except Fail as refused:
        assert "Serialized pre-packed weights" in str(refused)
        return
    assert not np.allclose(got[0], packing.run(packing.plain, packing.placements)[0])


def test_packing_twice_gives_the_same_file(packing: Packing, tmp_path: Path) -> None:
    data = packing.lowered.model.SerializeToString()
    packed, moved = pack_weights(data, packing.plain, packing.placements, tmp_path)
    assert packed.read_bytes() == packing.packed.read_bytes()
    assert moved == packing.moved


def test_a_model_that_does_not_open_cannot_be_packed(packing: Packing, tmp_path: Path) -> None:
    model = load_model(packing.lowered.model.SerializeToString())
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(CompileError, match=r"ONNX Runtime cannot save packed weights: .*NoSuchOperator"):
        pack_weights(model.SerializeToString(), packing.plain, packing.placements, tmp_path)
