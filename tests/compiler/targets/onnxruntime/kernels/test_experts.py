"""Experts whose matrices lie in panels, against the same arithmetic in numpy, one token and expert at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.targets.onnxruntime.kernels.panels import Panels
from tests.compiler.targets.onnxruntime.kernels.single import quantised, run
from tests.compiler.targets.onnxruntime.kernels.test_linear import close, matrix

Array = NDArray[np.float32]
COUNT, CHOSEN = 6, 2
FORMATS = [(4, True), (4, False), (8, True), (8, False)]


@dataclass
class Layer:
    """Random experts of one layer."""

    hidden: int = 64
    features: int = 48
    group: int = 32
    down_group: int = 16
    bits: int = 8
    offsets: bool = False

    def __post_init__(self) -> None:
        into = [self._matrix(2 * self.features, self.hidden, self.group, e) for e in range(COUNT)]
        out = [self._matrix(self.hidden, self.features, self.down_group, COUNT + e) for e in range(COUNT)]
        ending = "+offsets" if self.offsets else ""
        self.panels = {
            "gate_up": np.concatenate([held[f"gated{ending}"] for held, _ in into]),
            "down": np.concatenate([held[f"panels{ending}"] for held, _ in out]),
        }
        self.gate_up, self.down = [w for _, w in into], [w for _, w in out]

    def _matrix(self, rows: int, width: int, group: int, seed: int) -> tuple[Panels, Array]:
        return matrix(rows, width, group, self.bits, self.offsets, seed)

    def run(self, library: Path, x: Array, ids: NDArray[np.int64], shares: Array) -> NDArray[Any]:
        given = [("x", x), ("ids", ids), ("shares", shares), *self.panels.items()]
        return run(
            library, "Experts", given, ["y"], experts=COUNT, hidden=self.hidden, features=self.features,
            group=self.group, down_group=self.down_group, bits=self.bits, offsets=int(self.offsets), table=0,
        )["y"]  # fmt: skip

    def wanted(self, x: Array, ids: NDArray[np.int64], shares: Array) -> Array:
        out = np.zeros((len(x), self.hidden))
        for t, chosen in enumerate(ids):
            for expert, share in zip(chosen, shares[t], strict=True):
                matmul = (quantised(x[t : t + 1], self.group) @ self.gate_up[expert].T).astype(np.float64)
                gate, up = matmul[:, : self.features], matmul[:, self.features :]
                built = (gate / (1 + np.exp(-np.clip(gate, -700, 700))) * up).astype(np.float32)
                out[t] += share * (quantised(built, self.down_group) @ self.down[expert].T)[0]
        return out.astype(np.float32)


def step(tokens: int, hidden: int = 64, seed: int = 1) -> tuple[Array, NDArray[np.int64], Array]:
    """Hidden states, different experts of each token, and shares that do not add up to 1."""
    random = np.random.default_rng(seed)
    ids = np.stack([random.permutation(COUNT)[:CHOSEN] for _ in range(tokens)])
    x = random.normal(0, 0.1, (tokens, hidden)).astype(np.float32)
    return x, ids, random.uniform(0.01, 3, (tokens, CHOSEN)).astype(np.float32)


@pytest.mark.parametrize(("bits", "offsets"), FORMATS, ids=str)
def test_any_number_of_tokens_takes_the_experts_that_were_chosen(library: Path, bits: int, offsets: bool) -> None:
    layer = Layer(bits=bits, offsets=offsets)
    for tokens in (1, 2, 3, 5, 8, 11, 40):
        given = step(tokens)
        assert close(layer.run(library, *given), layer.wanted(*given)), tokens


@pytest.mark.parametrize("size", [(72, 16, 8, 16), (100, 80, 32, 32), (16, 112, 16, 64)], ids=str)
def test_sizes_that_fill_no_panel_and_no_group(library: Path, size: tuple[int, int, int, int]) -> None:
    layer = Layer(*size)
    for tokens in (1, 9):
        given = step(tokens, hidden=size[0])
        assert close(layer.run(library, *given), layer.wanted(*given)), tokens


@pytest.mark.parametrize("expert", [0, 3, COUNT - 1])
def test_all_tokens_to_one_expert(library: Path, expert: int) -> None:
    layer, (x, ids, shares) = Layer(), step(37)
    ids, shares = np.full((37, 1), expert), shares[:, :1]
    assert close(layer.run(library, x, ids, shares), layer.wanted(x, ids, shares))


def test_an_expert_that_a_token_names_twice_counts_twice(library: Path) -> None:
    layer, (x, _, shares) = Layer(), step(5)
    ids = np.full((5, 2), 4)
    assert close(layer.run(library, x, ids, shares), layer.wanted(x, ids, shares))


def test_every_expert_of_a_token(library: Path) -> None:
    layer, (x, _, _) = Layer(), step(4)
    ids = np.stack([np.roll(np.arange(COUNT), t) for t in range(4)])
    shares = np.random.default_rng(2).uniform(0, 1, ids.shape).astype(np.float32)
    assert close(layer.run(library, x, ids, shares), layer.wanted(x, ids, shares))


def test_a_token_is_the_same_alone_and_among_many(library: Path) -> None:
    layer, (x, ids, shares) = Layer(), step(300)
    whole = layer.run(library, x, ids, shares)
    for first, end in ((0, 1), (70, 75), (120, 300)):
        part = slice(first, end)
        assert (layer.run(library, x[part], ids[part], shares[part]) == whole[part]).all()


def test_experts_that_nobody_chose_do_not_count(library: Path) -> None:
    layer, (x, ids, shares) = Layer(), step(9)
    ids = np.where(ids == 2, 5, ids)
    clean = layer.run(library, x, ids, shares)
    for name, panels in layer.panels.items():
        layer.panels[name] = panels.copy()
        layer.panels[name].reshape(COUNT, -1)[2] = 0xFF  # scales that are no numbers
    assert (layer.run(library, x, ids, shares) == clean).all()


@pytest.mark.parametrize("member", ["x", "shares"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_token(library: Path, member: str, value: float) -> None:
    layer, (x, ids, shares) = Layer(), step(11)
    clean = layer.run(library, x, ids, shares)
    spoiled = x if member == "x" else shares
    spoiled[4, 1] = value
    built = layer.run(library, x, ids, shares)
    assert not np.isfinite(built[4]).any()
    assert (np.delete(built, 4, 0) == np.delete(clean, 4, 0)).all()


def test_no_tokens_and_no_experts_chosen(library: Path) -> None:
    layer, (x, ids, shares) = Layer(), step(3)
    assert layer.run(library, x[:0], ids[:0], shares[:0]).shape == (0, 64)
    assert not layer.run(library, x, ids[:, :0], shares[:, :0]).any()
