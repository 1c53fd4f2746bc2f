"""What is no number stays in its row and is seen there: nothing turns NaN or an infinity into a number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.compiler.targets.onnxruntime.kernels.single import Arrays, run
from tests.compiler.targets.onnxruntime.kernels.test_attention import Case
from tests.compiler.targets.onnxruntime.kernels.test_linear import attributes, matrix

ROWS = [(3, 600, 1), (1, 64, 20), (0, 0, 9), (2, 130, 1)]
VALUES = [np.nan, np.inf, -np.inf]


def others_are_as_before(case: Case, built: Arrays, clean: Arrays, row: int) -> bool:
    firsts = np.cumsum([0, *(n for _, _, n in case.rows)])
    own = np.arange(firsts[row], firsts[row + 1])
    return bool((np.delete(built["y"], own, 1) == np.delete(clean["y"], own, 1)).all())


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("row", range(len(ROWS)))
@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("window", [0, 70])
def test_in_a_new_token(library: Path, name: str, row: int, value: float, window: int) -> None:
    case = Case(4, 2, 32, ROWS, packed=False, window=window)
    given = case.inputs()
    clean = case.run(library, given)
    first, count = sum(n for _, _, n in ROWS[:row]), ROWS[row][2]
    token = first + count // 2
    given[name] = given[name].copy()
    given[name][0, token, 5] = value  # of the first head, or of the first group of two heads
    built = case.run(library, given)
    assert others_are_as_before(case, built, clean, row)
    heads = built["y"][0].reshape(-1, 4, 32)
    if name == "q":
        assert np.isnan(heads[token, 0]).all()
        assert (np.delete(built["y"], token, 1) == np.delete(clean["y"], token, 1)).all()
    elif name == "k":
        assert np.isnan(heads[token : first + count, :2]).all(), "for this token, and for those that see it"
    else:
        assert np.isnan(heads[token : first + count, :2, 5]).all()
    assert np.isfinite(heads[:, 2:]).all()


@pytest.mark.parametrize("index", [0, 5, 63, 64, 200, 511, 512, 700])
@pytest.mark.parametrize(("name", "seen"), [("past_k", slice(None)), ("past_v", 7)])
def test_in_the_cache(library: Path, name: str, seen: slice | int, index: int) -> None:
    case = Case(4, 2, 32, [(1, 701, 1), (0, 30, 3)])
    given = case.inputs()
    clean = case.run(library, given)
    given[name][1, 1, index, 7] = np.nan
    built = case.run(library, given)
    assert np.isnan(built["y"][0, 0].reshape(4, 32)[2:, seen]).all()
    assert others_are_as_before(case, built, clean, 0)


def test_in_all_that_a_window_has_left_of_a_block(library: Path) -> None:
    case = Case(4, 2, 32, [(0, 100, 1)], window=40)
    given = case.inputs()
    given["past_k"][0, 0, 61:64] = np.nan
    assert np.isnan(case.run(library, given)["y"][0, 0].reshape(4, 32)[:2]).all()
    given["past_k"][0, 0, :61] = np.nan
    given["past_k"][0, 0, 61:64] = 0
    assert np.isfinite(case.run(library, given)["y"]).all(), "what the window has left behind"


@pytest.mark.parametrize("name", "kv")
def test_what_float16_does_not_hold_is_no_number_in_the_cache(library: Path, name: str) -> None:
    case = Case(4, 2, 32, [(0, 10, 1), (1, 5, 1)], packed=False, turned=0)
    given = case.inputs()
    given[name][0, 0, :4] = 65504, 65519, -65520, 1e30
    built = case.run(library, given)
    held = built[f"{name}2"][0, 0, 10]
    assert held[:2].tolist() == [65504, 65504]
    assert np.isnan(held[2:4]).all() and np.isfinite(held[4:]).all()
    assert np.isnan(built["y"][0, 0].reshape(4, 32)[:2, 2:4]).all()
    assert np.isfinite(built["y"][0, 1]).all()


@pytest.mark.parametrize("value", [*VALUES, 1e30])
def test_in_a_norm(library: Path, value: float) -> None:
    """1e30 too: a row of zeros, which float32 makes of it, has lost what was there."""
    x = np.ones((3, 40), np.float32)
    x[1, 7] = value
    built = run(
        library, "AddNorm", [("x", x), ("r", np.zeros_like(x)), ("w", np.ones(40, np.float32))], ["y", "s"], eps=0.0
    )
    assert np.isnan(built["y"][1]).all()
    assert (built["y"][[0, 2]] == 1).all()


@pytest.mark.parametrize("value", VALUES)
def test_behind_a_gate(library: Path, value: float) -> None:
    held, _ = matrix(64, 64, 32, 8, offsets=False)
    x = np.ones((4, 64), np.float32)
    x[2, 40] = value
    built = run(library, "Linear", [("x", x), ("w", held["gated"])], ["y", "-s"],
               **attributes(64, 64, 32, 8, 0), gated=1)["y"]  # fmt: skip
    assert np.isnan(built[2]).all()
    assert np.isfinite(np.delete(built, 2, axis=0)).all()
