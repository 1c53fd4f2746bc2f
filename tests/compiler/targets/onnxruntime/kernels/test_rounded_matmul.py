"""Products of prompts' tokens in bfloat16, against the same arithmetic in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from llmc.compiler.targets.onnxruntime.formats import TABLES
from llmc.compiler.targets.onnxruntime.kernels.panels import CODEBOOKS
from llmc.runtime.executors.onnxruntime.session import Team
from tests.compiler.targets.onnxruntime.kernels.single import Library, run
from tests.compiler.targets.onnxruntime.kernels.test_emulated import to_bf16
from tests.compiler.targets.onnxruntime.kernels.test_linear import ONCE, SIZES, attributes, formats, matrix, tabled
from tests.tiers import default_cases

Array = NDArray[np.float32]
ROWS = (1, 3, 16, 17, 33, 40)
LONG = (40, 2100, 32)
"""A matrix of more inputs than are unpacked at once, which fill no whole tile."""


def rounded(x: Array) -> Array:
    """To bfloat16, as float32."""
    return (to_bf16(x).astype(np.uint32) << 16).view(np.float32).reshape(x.shape)


def matmul(
    library: Library, x: Array, panels: NDArray[np.uint8], attrs: dict[str, int], *, bias: Array | None = None,
    gated: int = 0, decoding: int = 0,
) -> Array:  # fmt: skip
    given: list[tuple[str, NDArray[Any] | None]] = [
        ("x", x), ("w", panels), ("b", bias), ("d", np.array([decoding], np.int64)),
    ]  # fmt: skip
    built: Array = run(library, "Linear", given, ["y", "-s"], **attrs, gated=gated)["y"]
    return built


def near(built: Array, wanted: NDArray[Any]) -> bool:
    """Sums of float32 in another order."""
    return bool(np.abs(built - wanted).max() < 2e-6 * np.abs(wanted).max() * np.sqrt(built.size) + 1e-30)


@default_cases(14)
@pytest.mark.parametrize(("size", "bits", "once"), formats([*SIZES, LONG]), ids=str)
def test_matmuls_of_every_number_of_rows(library: Path, size: tuple[int, int, int], bits: int, once: str) -> None:
    part, offsets = ONCE[once]
    held, weights = matrix(*size, bits, bool(offsets), zeros=once == "zeros")
    random = np.random.default_rng(1)
    bias = random.normal(0, 1, size[0]).astype(np.float32)
    for count in ROWS:
        x = random.normal(0, 1, (count, size[1])).astype(np.float32)
        wanted = rounded(x).astype(np.float64) @ rounded(weights).T.astype(np.float64)
        for b in (None, bias):
            built = matmul(library, x, held[f"panels{part}"], attributes(*size, bits, offsets), bias=b)
            assert near(built, wanted + (0 if b is None else b)), (count, b is None)


@pytest.mark.parametrize("table", list(CODEBOOKS))
def test_quantized_weights_with_a_table(library: Path, table: str) -> None:
    held, weights = tabled(100, 96, 16, table)
    x = np.random.default_rng(1).normal(0, 1, (37, 96)).astype(np.float32)
    built = matmul(library, x, held["panels"], attributes(100, 96, 16, 4, 0, TABLES.index(table)))
    assert near(built, rounded(x).astype(np.float64) @ rounded(weights).T)


@pytest.mark.parametrize("half", [16, 48])
def test_a_gate_lets_through_what_it_should(library: Path, half: int) -> None:
    held, weights = matrix(2 * half, 64, 32, 4, offsets=True)
    x = np.random.default_rng(1).normal(0, 1, (21, 64)).astype(np.float32)
    built = matmul(library, x, held["gated+offsets"], attributes(2 * half, 64, 32, 4, 1), gated=1)
    whole = rounded(x).astype(np.float64) @ rounded(weights).T
    gate, other = whole[:, :half], whole[:, half:]
    assert (
        np.abs(built - gate / (1 + np.exp(-np.clip(gate, -700, 700))) * other).max() < 1e-4 * np.abs(whole).max() ** 2
    )


@pytest.mark.parametrize("decoding", [0, 1, 5, 20, 37])
def test_rows_that_decode_have_the_bits_that_they_have_alone(library: Path, decoding: int) -> None:
    held, _ = matrix(96, 576, 32, 8, offsets=False)
    attrs, panels = attributes(96, 576, 32, 8, 0), held["panels"]
    x = np.random.default_rng(1).normal(0, 1, (37, 576)).astype(np.float32)
    built = matmul(library, x, panels, attrs, decoding=decoding)
    alone = run(library, "Linear", [("x", x), ("w", panels)], ["y", "-s"], **attrs, gated=0)["y"]
    assert (built[:decoding] == alone[:decoding]).all()
    assert (built[decoding:] == matmul(library, x, panels, attrs)[decoding:]).all()
    assert (built[decoding:] != alone[decoding:]).any(axis=1).all(), "the others are computed otherwise"


def test_many_rows_are_the_same_as_a_few(library: Path) -> None:
    held, _ = matrix(144, 576, 32, 8, offsets=False)  # nine panels: one is left of pairs
    x = np.random.default_rng(1).normal(0, 1, (1412, 576)).astype(np.float32)
    attrs = attributes(144, 576, 32, 8, 0)
    whole = matmul(library, x, held["panels"], attrs)
    for first in (0, 500, 700, 1407):
        assert (matmul(library, x[first : first + 5], held["panels"], attrs) == whole[first : first + 5]).all()


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_rows_that_no_cache_holds_are_the_same_as_a_few(library: Path, threads: int) -> None:
    """Several pairs of panels are multiplied with some inputs at a time then, as many as threads leave to a share."""
    size = (888, 2208, 32)  # 56 panels, and inputs that end within a block of them
    held, weights = matrix(*size, 8, offsets=False)
    x = np.random.default_rng(1).normal(0, 1, (532, size[1])).astype(np.float32)
    attrs, team = attributes(*size, 8, 0), Team(str(library), threads)
    whole = matmul(library, x, held["panels"], attrs)
    team.close()
    assert near(whole, rounded(x).astype(np.float64) @ rounded(weights).T.astype(np.float64))
    for first in (0, 253, 510, 527):
        assert (matmul(library, x[first : first + 5], held["panels"], attrs) == whole[first : first + 5]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_none_and_in_its_row(library: Path, value: float) -> None:
    held, _ = matrix(32, 64, 32, 8, offsets=True)
    x = np.ones((6, 64), np.float32)
    x[2, 40] = value
    built = matmul(library, x, held["panels+offsets"], attributes(32, 64, 32, 8, 1))
    assert not np.isfinite(built[2]).any()
    assert np.isfinite(np.delete(built, 2, axis=0)).all()


@pytest.mark.parametrize("decoding", [-1, 7, 1 << 62, -(1 << 63)])
def test_more_rows_that_decode_than_there_are_is_an_error(library: Path, decoding: int) -> None:
    held, _ = matrix(32, 64, 32, 8, offsets=False)
    with pytest.raises(InvalidArgument, match="more rows decode than there are"):
        matmul(library, np.ones((6, 64), np.float32), held["panels"], attributes(32, 64, 32, 8, 0), decoding=decoding)
