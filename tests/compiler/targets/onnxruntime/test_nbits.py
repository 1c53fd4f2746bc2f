"""Matrices in blocks of 4 or 8 bits: how they are made, which a model gets, and what ONNX Runtime makes of them."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmc.compiler.checkpoint.base import QuantisedBlocks
from llmc.compiler.checkpoint.gguf_file import BLOCK_TYPES
from llmc.compiler.program.ir import Graph, Node, Value
from llmc.compiler.targets.onnxruntime import packing
from llmc.compiler.targets.onnxruntime.formats import MatrixFormat, OnnxOptions
from llmc.compiler.targets.onnxruntime.onnx_model import load_model, set_placements
from llmc.compiler.targets.onnxruntime.packing import folds_offsets, pack_weights
from llmc.compiler.targets.onnxruntime.to_onnx import to_onnx
from llmc.compiler.weights.nbits import kept4, kept8, q4, quantise_q4
from llmc.compiler.weights.recipes import write_weights
from llmc.errors import CheckpointError, CompileError
from llmc.runtime.executors.onnxruntime import session as ort_session
from llmc.runtime.executors.onnxruntime.session import open_session
from tests.tiers import examples

Array = NDArray[np.float32]


class Blocks:
    """A source of tensors, some of which are stored in blocks."""

    def __init__(self, **held: Array | QuantisedBlocks) -> None:
        self.held = held

    def tensor_names(self) -> Sequence[str]:
        return list(self.held)

    def tensor(self, name: str) -> Array:
        held = self.held[name]
        return held.dequantise() if isinstance(held, QuantisedBlocks) else held

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        held = self.held[name]
        return held if isinstance(held, QuantisedBlocks) else None


def stored(kind: str, rows: int = 24, width: int = 64, seed: int = 0) -> QuantisedBlocks:
    random = np.random.default_rng(seed)
    bits, zero = {"Q8_0": (8, 128), "Q4_0": (4, 8), "Q4_1": (4, 0)}[kind]
    q = random.integers(0, 1 << bits, (rows, width // 32, 32)).astype(np.uint8)
    scale = random.uniform(0.01, 0.02, q.shape[:2]).astype(np.float16).astype(np.float32) * 16 / (1 << bits)
    minimum = random.uniform(-0.4, 0.1, q.shape[:2]).astype(np.float32) if kind == "Q4_1" else None
    return QuantisedBlocks(kind, bits, zero, q, scale, minimum)


def random_matrix(rows: int, width: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0, 0.3, (rows, width)).astype(np.float32)


def weights(parts: dict[str, NDArray[np.generic]], bits: int) -> Array:
    """What the parts of a family stand for, [N, K]."""
    data = parts["data"]
    assert data.dtype == np.uint8
    quantized = data if bits == 8 else np.stack([data & 15, data >> 4], -1).reshape(*data.shape[:2], -1)
    values = (quantized.astype(np.float32) - (1 << (bits - 1))) * parts["scales"][..., None] + parts["offsets"][
        ..., None
    ]
    assert (parts["rows"] == data).all() and (parts["columns"] == parts["offsets"].T).all()
    return values.reshape(len(data), -1).astype(np.float32)


def from_quantized(quantized: NDArray[np.uint8], scales: Array, offsets: Array) -> Array:
    return ((quantized.astype(np.float32) - 8) * scales[..., None] + offsets[..., None]).reshape(len(quantized), -1)


# Four bits of our own


@pytest.mark.parametrize("block", [16, 32, 64])
def test_four_bits_are_half_a_step_off_where_the_range_is_kept_and_better_on_the_whole(block: int) -> None:
    weight = random_matrix(40, 128)
    quantized, scales, offsets = quantise_q4(weight, block)
    assert (quantized.shape, scales.shape, offsets.shape) == (
        (40, 128 // block, block),
        (40, 128 // block),
        (40, 128 // block),
    )
    assert quantized.max() == 15
    error = np.square(from_quantized(quantized, scales, offsets) - weight).mean()
    blocks = weight.reshape(quantized.shape)
    low, step = blocks.min(-1, keepdims=True), np.ptp(blocks, axis=-1, keepdims=True) / 15
    rounded = np.rint((blocks - low) / step) * step + low
    assert error < 0.9 * np.square(rounded - blocks).mean(), "least squares, not the extremes"


def test_what_is_on_a_grid_of_sixteen_steps_is_exact() -> None:
    grid = stored("Q4_1", 40, 128)
    grid.q[..., :2] = [0, 15]
    weight = grid.dequantise()
    np.testing.assert_allclose(from_quantized(*quantise_q4(weight, 32)), weight, atol=2e-7)


def test_blocks_of_one_value_and_of_nothing_are_exact() -> None:
    weight = np.zeros((3, 64), np.float32)
    weight[1], weight[2, :32] = 3.5, -1e-41
    assert np.abs(from_quantized(*quantise_q4(weight, 32)) - weight).max() < 1e-36


def test_errors_count_as_important_as_their_inputs_are() -> None:
    random = np.random.default_rng(7)
    weight, importance = random.normal(size=(40, 64)).astype(np.float32), np.exp(random.normal(size=64) * 2)
    plain, weighted = (
        np.square(weight - from_quantized(*quantise_q4(weight, 32, counts))) @ importance
        for counts in (None, importance.astype(np.float32))
    )
    assert weighted.sum() < 0.7 * plain.sum()
    same = zip(quantise_q4(weight, 32), quantise_q4(weight, 32, np.full(64, 3, np.float32)), strict=True)
    assert all(np.allclose(one, other, atol=1e-5) for one, other in same)


def test_inputs_that_do_not_fill_a_block_are_padded_with_zeros() -> None:
    weight = random_matrix(6, 40)
    padded = np.pad(weight, ((0, 0), (0, 24)))
    for built, wanted in zip(quantise_q4(weight, 32), quantise_q4(padded, 32), strict=True):
        assert (built == wanted).all()


@examples(60)
@given(st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=32, max_size=32))
@example([0.0] * 31 + [float(np.finfo(np.float32).tiny)])
def test_any_numbers_are_no_worse_off_than_rounded_within_their_extremes(values: list[float]) -> None:
    weight = np.array([values], np.float32)
    built = from_quantized(*quantise_q4(weight, 32)).astype(np.float64)
    exact = weight.astype(np.float64)  # squares of float32's smallest numbers are 0 in float32
    step = (exact.max() - exact.min()) / 15
    rounded = np.rint((exact - exact.min()) / step) * step + exact.min() if step > 0 else exact
    worst = np.square(rounded - exact).sum()
    without_a_scale = 32 * (15 * float(np.finfo(np.float32).tiny)) ** 2  # a step below that has no reciprocal
    assert np.square(built - exact).sum() <= 1.001 * worst + 1e-10 * np.square(exact).max() + without_a_scale


# The checkpoint's own blocks


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bit_blocks_are_kept_as_they_are(kind: str) -> None:
    source = Blocks(a=stored(kind), b=stored(kind, seed=1))
    wanted = np.concatenate([source.tensor("a"), source.tensor("b")])
    for family in (kept4, q4):
        parts = family(["a", "b"], source, 32)
        np.testing.assert_allclose(weights(parts, 4), wanted, atol=1e-6)
    if kind == "Q4_0":
        assert not parts["offsets"].any()


def test_blocks_of_any_type_are_exact_side_by_side_in_eight_bits() -> None:
    source = Blocks(a=stored("Q8_0"), b=stored("Q4_0", seed=1), c=stored("Q4_1", seed=2))
    wanted = np.concatenate([source.tensor(n) for n in "abc"])
    np.testing.assert_allclose(weights(kept8(list("abc"), source, 32), 8), wanted, atol=1e-6)


def test_what_has_no_blocks_is_quantised_beside_what_has() -> None:
    plain = random_matrix(8, 64)
    source = Blocks(a=stored("Q4_1"), b=plain)
    eight, four = weights(kept8(["a", "b"], source, 32), 8), weights(q4(["a", "b"], source, 32), 4)
    for built in (eight, four):
        np.testing.assert_allclose(built[:24], source.tensor("a"), atol=1e-6)
    assert 0 < np.abs(eight[24:] - plain).max() < 0.01 < np.abs(four[24:] - plain).max() < 0.1


def test_keeping_four_bits_of_what_has_eight_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"a is no longer stored in 4-bit blocks of 32.*compile again"):
        kept4(["a"], Blocks(a=stored("Q8_0")), 32)


# Which format a matrix gets

KEEP = {
    name: BLOCK_TYPES[kind].form
    for name, kind in {"q": "Q4_0", "k": "Q4_0", "v": "Q4_1", "o": "Q8_0", "head": "Q8_0"}.items()
}


@pytest.mark.parametrize(
    ("sources", "keep", "int4"),
    [
        ("q k", MatrixFormat("kept4", 4, 32), MatrixFormat("kept4", 4, 32)),
        ("q k v", MatrixFormat("kept4", 4, 32, True), MatrixFormat("kept4", 4, 32, True)),
        ("q o", MatrixFormat("kept8", 8, 32), MatrixFormat("q4", 4, 32, True)),
        ("v f", MatrixFormat("kept8", 8, 32, True), MatrixFormat("q4", 4, 32, True)),
        ("f", MatrixFormat("q8", 8, 32), MatrixFormat("q4", 4, 32, True)),
        ("head", MatrixFormat("kept8", 8, 32), MatrixFormat("kept8", 8, 32)),
        ("f-head", MatrixFormat("q8", 8, 32), MatrixFormat("q8", 8, 32)),
    ],
)
def test_a_matrix_keeps_its_blocks_where_all_of_it_has_such(
    sources: str, keep: MatrixFormat, int4: MatrixFormat
) -> None:
    names = sources.removeprefix("f-").split()
    own = {} if sources.startswith("f-") else KEEP
    assert OnnxOptions(32, stored=own).format(names, 64, lm_head="head" in sources) == keep
    assert OnnxOptions(32, bits=4, stored=own).format(names, 64, lm_head="head" in sources) == int4


def test_what_a_bound_widens_is_in_eight_bits_with_what_it_is_fused_with() -> None:
    options = OnnxOptions(32, bits=4, wide=frozenset({"v"}))
    assert options.format(["v"], 64) == options.format(["q", "v"], 64) == MatrixFormat("q8", 8, 32)
    assert options.format(["q"], 64) == MatrixFormat("q4", 4, 32, True)


def test_groups_are_those_requested_also_where_hidden_states_are_normed() -> None:
    assert OnnxOptions(64).format(["w"], 128, normed=True).block == 32
    requested = OnnxOptions(128, normed=128)
    assert [requested.format(["w"], width, normed=True).block for width in (1536, 576, 96)] == [128, 64, 32]


def test_the_key_of_a_lowering_reports_formats_apart() -> None:
    stored = {"a": BLOCK_TYPES["Q4_1"].form}
    options = [
        OnnxOptions(0), OnnxOptions(32), OnnxOptions(32, bits=4), OnnxOptions(32, bits=4, lm_head_bits=4),
        OnnxOptions(32, stored=stored), OnnxOptions(32, stored=stored, fold=True),
        OnnxOptions(32, stored={"a": BLOCK_TYPES["Q4_0"].form}), OnnxOptions(32, bits=4, wide=frozenset({"a"})),
        OnnxOptions(32, bits=4, wide=frozenset({"a", "b"})), OnnxOptions(32, normed=16),
    ]  # fmt: skip
    named = [o.components for o in options]
    assert all(named.count(one) == 1 for one in named)
    assert named[:2] == [{"block": 0}, {"block": 32}]


# What ONNX Runtime makes of them


def two_layers() -> Graph:
    """logits = linear(linear(embedding(ids)) + bias); the embedding and the first matrix have offsets."""
    ids, lengths = Value("token_ids", ("B", "Q"), "int64"), Value("past_lengths", ("B",), "int64")
    embedding, first, bias, second = (
        Value(n, s, "float32") for n, s in (("e", (40, 64)), ("a", (24, 64)), ("bias", (24,)), ("b", (40, 24)))
    )
    x, h, y = (Value(n, ("B", "Q", w), "float32") for n, w in (("x", 64), ("h", 24), ("y", 40)))
    nodes = [
        Node("embedding", [embedding, ids], [x]), Node("linear", [x, first, bias], [h], {"parts": [24]}),
        Node("linear", [h, second], [y]),
    ]  # fmt: skip
    named = {embedding: "embedding", first: "first", bias: "bias", second: "second"}
    return Graph({"token_ids": ids, "past_lengths": lengths}, [("logits", y)], nodes, named, {})


SOURCE = Blocks(
    embedding=stored("Q4_1", 40), first=stored("Q4_1", 24, seed=1), second=random_matrix(40, 24, 2),
    bias=random_matrix(1, 24, 3)[0],
)  # fmt: skip
STORED = dict.fromkeys(("embedding", "first"), BLOCK_TYPES["Q4_1"].form)


TOKENS, TOKEN = np.array([[0, 1, 39], [7, 8, 9]]), np.array([[39]])
"""Several, and one: the runtime has kernels of their own for one row on some CPUs."""


def run(folder: Path, fold: bool, ids: NDArray[np.int64] = TOKENS) -> Array:
    """Logits of tokens through packed weights."""
    lowered = to_onnx(two_layers(), OnnxOptions(32, stored=STORED, fold=fold))
    assert bool(lowered.folded) == fold
    data = io.BytesIO()
    placed = write_weights(lowered.recipes, SOURCE, {}, data)
    (folder / "plain").write_bytes(data.getvalue())
    placements = {n: {"offset": p.offset, "length": p.length} for n, p in placed.items()}
    (folder / "work").mkdir()
    file, placements = pack_weights(
        lowered.model.SerializeToString(), folder / "plain", placements, folder / "work", lowered.folded
    )
    model = set_placements(lowered.model, file.name, placements).SerializeToString()
    where = {"session__model_external_initializers_file_folder_path": str(file.parent)}
    given = {"token_ids": ids, "past_lengths": np.zeros(len(ids), np.int64)}
    logits: Array = open_session(model, **where).run(None, given)[0]
    return logits


def exact(ids: NDArray[np.int64] = TOKENS) -> Array:
    hidden = SOURCE.tensor("embedding")[ids] @ SOURCE.tensor("first").T + SOURCE.tensor("bias")
    logits: Array = hidden @ SOURCE.tensor("second").T
    return logits


def test_graphs_add_offsets(tmp_path: Path) -> None:
    """To 8-bit activations and weights; without the offsets nothing would be near."""
    wanted, got = exact(), run(tmp_path, fold=False)
    assert np.abs(got - wanted).max() < 0.03 * np.abs(wanted).max()


def test_packed_copies_take_in_offsets_exactly_where_the_runtime_is_said_to_let_them(tmp_path: Path) -> None:
    """ONNX Runtime 1.31 runs packed copies as they are, but for one row on CPUs without AVX-512; 1.32 refuses those
    that it did not make itself."""
    if not folds_offsets():
        try:
            one = run(tmp_path, fold=True, ids=TOKEN)
        except Exception as e:  # noqa: BLE001 - the runtime's own, or a CompileError
            assert re.search(r"pre-packed weights|no room for offsets|not laid out as", str(e))
        else:
            assert np.abs(one - exact(TOKEN)).max() > 0.03 * np.abs(exact(TOKEN)).max()
        return
    built = []
    for fold in (False, True):
        (tmp_path / str(fold)).mkdir()
        built.append(run(tmp_path / str(fold), fold))
    np.testing.assert_allclose(*built, atol=0.01 * np.abs(built[0]).max())


@pytest.mark.parametrize("fault", ["refuses", "packs again"])
def test_a_runtime_that_does_not_run_what_was_packed_is_not_given_offsets_to_fold(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """What 1.32 does at open, and what a version would do that packs again and says nothing."""
    opened = open_session

    def session(model: str | bytes, *args: Any, **more: Any) -> Any:
        if isinstance(model, bytes) and fault == "refuses":
            raise RuntimeError("Serialized pre-packed weights do not match")
        if isinstance(model, bytes):
            built = load_model(model)
            for tensor in built.graph.initializer:
                kept = [entry for entry in tensor.external_data if not entry.key.startswith("prepacked")]
                del tensor.external_data[:]
                tensor.external_data.extend(kept)
            model = built.SerializeToString()
        return opened(model, *args, **more)

    monkeypatch.setattr(ort_session, "open_session", session)
    assert not folds_offsets()


def test_a_layout_that_is_not_the_known_one_is_refused_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_LANES", 8)
    assert not folds_offsets()
    with pytest.raises(CompileError, match=r"is not laid out as this llmc knows it|has no room for offsets"):
        run(tmp_path, True)


def test_where_offsets_are_folded_no_graph_reads_them() -> None:
    folded = to_onnx(two_layers(), OnnxOptions(32, stored=STORED, fold=True))
    apart = to_onnx(two_layers(), OnnxOptions(32, stored=STORED))
    ops = [[node.op_type for node in built.model.graph.node] for built in (folded, apart)]
    assert "ReduceSum" not in ops[0] and ops[1].count("ReduceSum") == 1
    declared = {t.name for t in load_model(folded.model.SerializeToString()).graph.initializer}
    ((matrix, offsets),) = folded.folded.items()
    assert matrix in declared and offsets not in declared
    assert offsets in {r.name for r in folded.recipes}


def test_offsets_of_blocks_of_16_are_left_to_graphs() -> None:
    stored = dict.fromkeys(STORED, BLOCK_TYPES["Q2_K"].form)
    built = to_onnx(two_layers(), OnnxOptions(32, stored=stored, fold=True))
    assert [node.op_type for node in built.model.graph.node].count("ReduceSum") == 1 and not built.folded
