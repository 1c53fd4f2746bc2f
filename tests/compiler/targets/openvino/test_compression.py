"""Codes, scales and zero points: what they give back, by the rule that OpenVINO applies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import float4_e2m1fn
from numpy.typing import NDArray

from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.checkpoint.base import QuantisedBlocks
from llmc.compiler.checkpoint.gguf import GgufCheckpoint
from llmc.compiler.checkpoint.gguf_file import BLOCK_TYPES
from llmc.compiler.targets.openvino import compression
from llmc.compiler.weights.recipes import FAMILIES
from llmc.errors import CheckpointError
from tests.compiler.checkpoint.writers import write_gguf

ROWS, WIDTH, BLOCK = 4, 64, 32
ROUNDING = 4 * 2.0**-24
"""Of a zero point, a subtraction, a product, and the sum that it stands for: half a unit in the last place each."""


class Source:
    """A checkpoint of `tensors`, and of `stored` blocks whose tensors are what they dequantise to."""

    def __init__(
        self,
        tensors: Mapping[str, NDArray[np.float32]] | None = None,
        stored: Mapping[str, QuantisedBlocks] | None = None,
    ) -> None:
        self._stored = dict(stored or {})
        self._tensors = dict(tensors or {}) | {name: b.dequantise() for name, b in self._stored.items()}

    def tensor_names(self) -> Sequence[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self._tensors[name]

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        return self._stored.get(name)

    def forms(self) -> dict[str, BlockForm]:
        """As `Checkpoint.stored_form` says."""
        return {name: BLOCK_TYPES[b.type].form for name, b in self._stored.items()}


def blocks(kind: str, seed: int = 0, rows: int = ROWS, width: int = WIDTH) -> QuantisedBlocks:
    """Random blocks of a GGUF format; scales and minimums are float16 numbers, as in files."""
    random = np.random.default_rng(seed)
    bits = 8 if kind == "Q8_0" else 4
    shape = (rows, width // BLOCK)
    quantized = random.integers(0, 2**bits, (*shape, BLOCK), np.uint8)
    scale = random.standard_normal(shape).astype(np.float16).astype(np.float32)
    minimum = None
    if kind == "Q4_1":
        scale = np.abs(scale)
        minimum = (4 * random.standard_normal(shape)).astype(np.float16).astype(np.float32)
    return QuantisedBlocks(kind, bits, {"Q8_0": 128, "Q4_0": 8, "Q4_1": 0}[kind], quantized, scale, minimum)


def given_back(parts: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    """scale · (code − zero) in float32, [N, K]."""
    quantized = parts["data"].astype(np.float32)
    built: NDArray[np.float32] = (quantized - parts.get("zeros", np.float32(0))) * parts["scales"]
    return built.reshape(len(built), -1)


def float4(parts: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    """As `four_bits`, of codes of float4 e2m1."""
    values = parts["scales"] * _in_turn(parts["data"]).view(float4_e2m1fn).astype(np.float32)
    return values.reshape(len(values), -1)


def _in_turn(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.stack([data & np.uint8(15), data >> np.uint8(4)], -1).reshape(*data.shape[:-1], -1)


def four_bits(parts: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    """As `given_back`, of two codes in a byte."""
    return given_back({**parts, "data": _in_turn(parts["data"])})


def test_every_family_is_registered() -> None:
    families = ("i8", "u4", "u4kept", "i8kept", "u8kept", "f16")
    assert {f: FAMILIES[f] for f in families} == {f: f"{compression.__name__}:{f}" for f in families}


@pytest.mark.parametrize("group", [0, 32, 48])
def test_eight_bits_are_within_half_a_step_and_keep_the_largest(group: int) -> None:
    weight = np.random.default_rng(0).standard_normal((6, 96)).astype(np.float32)
    weight[2] = 0
    parts = compression.i8(["a"], Source({"a": weight}), group)
    assert parts["data"].shape == ((6, 96) if not group else (6, 96 // group, group))
    step = np.repeat(parts["scales"].reshape(6, -1), group or 96, axis=1)
    assert (np.abs(given_back(parts) - weight) <= step / 2 * (1 + 1e-6)).all()
    assert np.abs(parts["data"]).max() == 127
    assert not given_back(parts)[2].any()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_stored_four_bit_blocks_are_exact_within_the_rounding_of_the_formula(kind: str) -> None:
    stored = blocks(kind, seed=1)
    parts = compression.u4kept(["a"], Source(stored={"a": stored}), 32)
    minimum = np.zeros_like(stored.scale) if stored.minimum is None else stored.minimum
    bound = ROUNDING * (np.abs(minimum) + 15 * np.abs(stored.scale))
    assert (np.abs(four_bits(parts) - stored.dequantise()) <= np.repeat(bound, 32, axis=1)).all()


def test_blocks_of_q4_0_are_exact_to_the_bit() -> None:
    stored = blocks("Q4_0", seed=2)
    parts = compression.u4kept(["a"], Source(stored={"a": stored}), 32)
    np.testing.assert_array_equal(four_bits(parts), stored.dequantise())


def test_blocks_of_a_minimum_alone_are_exact_to_the_bit() -> None:
    stored = blocks("Q4_1", seed=3)
    assert stored.minimum is not None
    stored.scale[:] = 0
    stored.minimum[0, 0] = 0
    parts = compression.u4kept(["a"], Source(stored={"a": stored}), 32)
    np.testing.assert_array_equal(four_bits(parts), stored.dequantise())
    assert np.isfinite(parts["zeros"]).all()


def test_minimums_far_beyond_their_scale_stay_finite_and_near() -> None:
    stored = blocks("Q4_1", seed=4)
    assert stored.minimum is not None
    stored.scale[:], stored.minimum[:] = np.float32(2.0**-24), np.float32(65504)
    parts = compression.u4kept(["a"], Source(stored={"a": stored}), 32)
    np.testing.assert_allclose(four_bits(parts), stored.dequantise(), rtol=ROUNDING)


def test_stored_eight_bit_blocks_are_exact_to_the_bit() -> None:
    stored = blocks("Q8_0", seed=5)
    parts = compression.i8kept(["a", "a"], Source(stored={"a": stored}), 32)
    assert parts["data"].dtype == np.int8
    np.testing.assert_array_equal(given_back(parts), np.concatenate([stored.dequantise()] * 2))


def test_matrices_stored_in_different_ways_share_eight_bit_quantized_weights_each_exact() -> None:
    stored = {kind: blocks(kind, seed=i) for i, kind in enumerate(("Q4_0", "Q4_1", "Q8_0"))}
    plain = np.random.default_rng(9).standard_normal((4, 64)).astype(np.float32)
    source = Source({"plain": plain}, stored)
    parts = compression.u8kept([*stored, "plain"], source, 32)
    got = np.split(given_back(parts), 4)
    for kind, built in zip(stored, got[:3], strict=True):
        np.testing.assert_allclose(built, stored[kind].dequantise(), atol=64 * ROUNDING)
    np.testing.assert_array_equal(got[3], given_back(compression.i8(["plain"], source, 32)))


def test_four_bits_of_our_own_are_within_their_range() -> None:
    weight = np.random.default_rng(6).standard_normal((8, 64)).astype(np.float32) + 3
    parts = compression.u4(["a"], Source({"a": weight}), 32)
    grouped = weight.reshape(8, 2, 32)
    span = np.ptp(grouped, axis=-1, keepdims=True)
    error = np.abs(four_bits(parts) - weight).reshape(grouped.shape)
    assert (error <= 0.1 * span * (1 + 1e-5)).all()  # a range drawn in by a fifth loses a tenth at each end
    assert np.sqrt(np.square(error).mean()) < 0.025 * span.mean()


def test_four_bits_are_the_checkpoints_own_where_it_has_some_of_that_size() -> None:
    stored = blocks("Q4_1", seed=7)
    source = Source(stored={"a": stored})
    np.testing.assert_array_equal(
        compression.u4(["a"], source, 32)["data"], compression.u4kept(["a"], source, 32)["data"]
    )
    assert compression.u4(["a"], source, 64)["data"].shape == (4, 1, 32)


def test_float16_refuses_what_it_cannot_hold() -> None:
    assert compression.f16(["a"], Source({"a": np.ones((2, 2), np.float32)}), 0)["data"].dtype == np.float16
    with pytest.raises(CheckpointError, match=r"a has values beyond float16's 65504; choose --dtype bf16 or f32"):
        compression.f16(["a"], Source({"a": np.full((2, 2), 1e6, np.float32)}), 0)


@pytest.mark.parametrize("family", ["u4kept", "i8kept"])
def test_a_tensor_without_the_blocks_that_were_promised_is_named(family: str) -> None:
    source = Source({"a": np.ones((2, 32), np.float32)}, {"b": replace(blocks("Q8_0"), bits=6, type="Q6")})
    with pytest.raises(CheckpointError, match=r"a has no blocks in the checkpoint, not blocks of 32 in . bits"):
        getattr(compression, family)(["a"], source, 32)
    with pytest.raises(CheckpointError, match="b has Q6 blocks of 32 in the checkpoint"):
        getattr(compression, family)(["b"], source, 32)


@pytest.mark.parametrize(("kind", "family"), [("Q4_0", "u4kept"), ("Q4_1", "u4kept"), ("Q8_0", "i8kept")])
def test_a_gguf_files_tensor_is_given_back_with_its_rows_in_order(tmp_path: Path, kind: str, family: str) -> None:
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "tiny.gguf", types={"q_proj": kind}))
    name = "model.layers.0.self_attn.q_proj.weight"
    parts = getattr(compression, family)([name], checkpoint, 32)
    built = given_back(parts) if family == "i8kept" else four_bits(parts)
    np.testing.assert_allclose(built, checkpoint.tensor(name), atol=64 * ROUNDING)
