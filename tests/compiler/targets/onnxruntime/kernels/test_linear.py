"""Products with matrices in panels, and look-ups in them, against the same arithmetic in numpy."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from llmc.compiler.targets.onnxruntime.formats import TABLES
from llmc.compiler.targets.onnxruntime.kernels.panels import CODEBOOKS, LANES, Panels, panel_bytes, to_float16
from tests.compiler.targets.onnxruntime.kernels.single import quantised, run
from tests.tiers import default_cases

Array = NDArray[np.float32]
SIZES = [(64, 64, 16), (96, 576, 32), (100, 96, 32), (32, 1536, 64), (40, 128, 64), (17, 72, 8), (48, 40, 32)]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 22, 37)


def matrix(
    rows: int, width: int, group: int, bits: int, offsets: bool, seed: int = 0, zeros: bool = False
) -> tuple[Panels, Array]:
    """Panels of random codes, and the weights that they stand for. `zeros`: offsets are whole zero points."""
    random = np.random.default_rng(seed)
    blocks = -(-width // group)
    quantized = random.integers(0, 1 << bits, (rows, blocks, group)).astype(np.uint8)
    quantized.reshape(rows, -1)[:, width:] = 0
    scales = to_float16(random.uniform(0.001, 0.1, (rows, blocks)).astype(np.float32))
    zero = 1 << (bits - 1)
    starts = random.normal(0, 1, (rows, blocks)).astype(np.float16).astype(np.float32)
    if zeros:
        starts = -random.integers(0, 1 << bits, (rows, blocks)).astype(np.float32) * scales
    held = Panels(["w"], bits, quantized, scales, starts + zero * scales if offsets else np.zeros_like(scales))
    weights = quantized * scales[..., None] + (starts if offsets else -zero * scales)[..., None]
    return held, weights.reshape(rows, -1)[:, :width].astype(np.float32)


def attributes(rows: int, width: int, group: int, bits: int, offsets: int, table: int = 0) -> dict[str, int]:
    return {"rows": rows, "width": width, "group": group, "bits": bits, "offsets": offsets, "table": table}


ONCE = {"symmetric": ("", 0), "offsets": ("+offsets", 1), "zeros": ("+zeros", 2)}
"""What blocks have beside their scale: the end of the part's name, and the attribute."""


def formats(sizes: list[tuple[int, int, int]]) -> list[tuple[tuple[int, int, int], int, str]]:
    """All that there are of matrices of these sizes: with their bits, and with what is beside scales."""
    every = itertools.product(sizes, (4, 6, 8), ONCE)
    return [(size, bits, once) for size, bits, once in every if bits != 6 or (size[2] % 16 == 0 and once != "zeros")]


def tabled(rows: int, width: int, group: int, table: str) -> tuple[Panels, Array]:
    """Panels of random codes with a table, and the weights that they stand for."""
    held, _ = matrix(rows, width, group, 4, offsets=False)
    values = CODEBOOKS[table][held.quantized].reshape(rows, -1)[:, :width].astype(np.float32) - 128
    return held, values * np.repeat(held.scales, group, axis=1)[:, :width]


def close(built: NDArray[Any], wanted: Array) -> bool:
    """A code that numpy rounds the other way is half a step of one activation."""
    return bool(np.abs(built - wanted).max() < 4e-3 * np.abs(wanted).max()) and bool(
        np.mean(np.abs(built - wanted)) < 1e-5 * np.abs(wanted).max()
    )


@default_cases(14)
@pytest.mark.parametrize(("size", "bits", "once"), formats(SIZES), ids=str)
def test_matmuls_of_every_number_of_rows(library: Path, size: tuple[int, int, int], bits: int, once: str) -> None:
    rows, width, group = size
    part, offsets = ONCE[once]
    held, weights = matrix(rows, width, group, bits, bool(offsets), zeros=once == "zeros")
    panels = held[f"panels{part}"]
    assert len(panels) == panel_bytes(rows, width, group, bits, bool(offsets))
    random = np.random.default_rng(1)
    bias = random.normal(0, 1, rows).astype(np.float32)
    for count in ROWS:
        x = random.normal(0, 1, (count, width)).astype(np.float32)
        for b in (None, bias):
            built = run(library, "Linear", [("x", x), ("w", panels), ("b", b)], ["y", "-s"],
                       **attributes(rows, width, group, bits, offsets), gated=0)["y"]  # fmt: skip
            assert close(built, quantised(x, group) @ weights.T + (0 if b is None else b)), (count, b is None)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("half", [16, 48, 80])
def test_a_gate_lets_through_what_it_should(library: Path, bits: int, half: int) -> None:
    held, weights = matrix(2 * half, 64, 32, bits, offsets=True)
    random = np.random.default_rng(1)
    for count in ROWS:
        x = random.normal(0, 1, (count, 64)).astype(np.float32)
        built = run(library, "Linear", [("x", x), ("w", held["gated+offsets"])], ["y", "-s"],
                   **attributes(2 * half, 64, 32, bits, 1), gated=1)["y"]  # fmt: skip
        product = (quantised(x, 32) @ weights.T).astype(np.float64)
        gate, other = product[:, :half], product[:, half:]
        wanted = gate / (1 + np.exp(-np.clip(gate, -700, 700))) * other
        assert close(built, wanted.astype(np.float32)), count


@pytest.mark.parametrize("table", list(CODEBOOKS))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_quantized_weights_with_a_table(library: Path, size: tuple[int, int, int], table: str) -> None:
    held, weights = tabled(*size, table)
    attrs = attributes(*size, 4, 0, TABLES.index(table))
    for count in ROWS:
        x = np.random.default_rng(count).normal(0, 1, (count, size[1])).astype(np.float32)
        built = run(library, "Linear", [("x", x), ("w", held["panels"])], ["y", "-s"], **attrs, gated=0)["y"]
        assert close(built, quantised(x, size[2]) @ weights.T), count
    rows = run(library, "Embedding", [("ids", np.arange(size[0])), ("w", held["panels"])], ["y"], **attrs)["y"]
    np.testing.assert_allclose(rows, weights, rtol=0, atol=1e-5)


def test_many_rows_are_the_same_as_a_few(library: Path) -> None:
    held, _ = matrix(160, 576, 32, 8, offsets=False)
    x = np.random.default_rng(1).normal(0, 1, (1412, 576)).astype(np.float32)  # four are left of whole blocks of 128
    attrs = attributes(160, 576, 32, 8, 0)
    whole = run(library, "Linear", [("x", x), ("w", held["panels"])], ["y", "-s"], **attrs, gated=0)["y"]
    for first in (0, 700, 1407):
        part = x[first : first + 5]
        built = run(library, "Linear", [("x", part), ("w", held["panels"])], ["y", "-s"], **attrs, gated=0)["y"]
        assert (built == whole[first : first + 5]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_none_and_in_its_row(library: Path, value: float) -> None:
    held, _ = matrix(32, 64, 32, 8, offsets=True)
    x = np.ones((6, 64), np.float32)
    x[2, 40] = value
    built = run(library, "Linear", [("x", x), ("w", held["panels+offsets"])], ["y", "-s"],
               **attributes(32, 64, 32, 8, 1), gated=0)["y"]  # fmt: skip
    assert np.isnan(built[2]).all()
    assert np.isfinite(np.delete(built, 2, axis=0)).all()


def test_a_row_of_nothing_and_a_row_of_large_numbers(library: Path) -> None:
    held, weights = matrix(32, 64, 32, 8, offsets=True)
    x = np.zeros((3, 64), np.float32)
    x[1], x[2] = 1e30, 1e-38
    built = run(library, "Linear", [("x", x), ("w", held["panels+offsets"])], ["y", "-s"],
               **attributes(32, 64, 32, 8, 1), gated=0)["y"]  # fmt: skip
    assert not built[0].any() and not built[2].any()
    assert np.allclose(built[1], (np.full(64, 1e30) @ weights.T).astype(np.float32), rtol=1e-5)


@pytest.mark.parametrize(("size", "bits", "once"), formats(SIZES), ids=str)
def test_rows_of_a_matrix(library: Path, size: tuple[int, int, int], bits: int, once: str) -> None:
    part, offsets = ONCE[once]
    held, weights = matrix(*size, bits, bool(offsets), zeros=once == "zeros")
    ids = np.random.default_rng(1).integers(0, size[0], (3, 7))
    panels = held[f"panels{part}"]
    built = run(library, "Embedding", [("ids", ids), ("w", panels)], ["y"], **attributes(*size, bits, offsets))["y"]
    assert built.shape == (3, 7, size[1])
    assert np.abs(built - weights[ids]).max() < 1e-5


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_whole_zero_points_have_float32_error_alone(library: Path, bits: int) -> None:
    """float16 would round scale · zero: half of its last place is beyond this bound."""
    held, weights = matrix(48, 64, 32, bits, offsets=True, zeros=True)
    ids = np.arange(48)[None]
    built = run(library, "Embedding", [("ids", ids), ("w", held["panels+zeros"])], ["y"],
               **attributes(48, 64, 32, bits, 2))["y"]  # fmt: skip
    largest = held.scales.max() * (1 << bits)
    assert np.abs(built[0] - weights).max() <= 2.0**-22 * largest


@pytest.mark.parametrize("bad", [-1, 32])
def test_a_token_that_is_not_in_the_vocabulary_is_refused(library: Path, bad: int) -> None:
    held, _ = matrix(32, 64, 32, 8, offsets=False)
    ids = np.array([[0, bad]], np.int64)
    with pytest.raises(InvalidArgument, match="a token id is not in the vocabulary"):
        run(library, "Embedding", [("ids", ids), ("w", held["panels"])], ["y"], **attributes(32, 64, 32, 8, 0))


def test_panels_of_another_matrix_are_refused(library: Path) -> None:
    held, _ = matrix(32, 64, 32, 8, offsets=False)
    x = np.ones((1, 64), np.float32)
    with pytest.raises(InvalidArgument, match="panels of another matrix"):
        run(library, "Linear", [("x", x), ("w", held["panels"][:-LANES])], ["y", "-s"],
            **attributes(32, 64, 32, 8, 0), gated=0)  # fmt: skip
    with pytest.raises(InvalidArgument, match="x has not `width` inputs"):
        run(library, "Linear", [("x", x[:, :32]), ("w", held["panels"])], ["y", "-s"],
            **attributes(32, 64, 32, 8, 0), gated=0)  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits": 5},
        {"group": 12},
        {"rows": 0},
        {"bits": 6, "group": 8},
        {"bits": 6, "offsets": 2},
        {"table": 1},
        {"bits": 4, "table": 3},
        {"bits": 4, "table": 1, "offsets": 1},
    ],
)
def test_a_matrix_that_cannot_be_is_refused_when_the_graph_is_opened(library: Path, wrong: dict[str, int]) -> None:
    held, _ = matrix(32, 64, 32, 8, offsets=False)
    attrs = attributes(32, 64, 32, 8, False) | wrong
    with pytest.raises(Exception, match="a matrix needs rows, width, 4, 6 or 8 bits, a group that is a multiple of 8"):
        run(library, "Linear", [("x", np.ones((1, 64), np.float32)), ("w", held["panels"])], ["y", "-s"], **attrs,
            gated=0)  # fmt: skip


@pytest.mark.parametrize("width", [16, 64, 576, 100])
def test_sums_and_norms(library: Path, width: int) -> None:
    random = np.random.default_rng(0)
    for rows in (1, 3, 300):
        x, residual = random.normal(0, 2, (2, rows, width)).astype(np.float32)
        weight = random.normal(1, 0.1, width).astype(np.float32)
        built = run(library, "AddNorm", [("x", x), ("r", residual), ("w", weight)], ["y", "s"], eps=1e-5)
        total = x + residual
        wanted = total / np.sqrt((total.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * weight
        assert (built["s"] == total).all()
        assert np.abs(built["y"] - wanted).max() < 1e-5
        for outputs in (["y"], ["y", "s"]):
            alone = run(library, "AddNorm", [("x", total), ("r", None), ("w", weight)], outputs, eps=1e-5)
            assert (alone["y"] == built["y"]).all()
            assert (alone.get("s", total) == total).all()
