"""What norms, gates and products hand on to each other in bfloat16 is what they would round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument

from tests.compiler.targets.onnxruntime.kernels.single import Library, run
from tests.compiler.targets.onnxruntime.kernels.test_emulated import to_bf16
from tests.compiler.targets.onnxruntime.kernels.test_linear import attributes, matrix
from tests.compiler.targets.onnxruntime.kernels.test_rounded_matmul import matmul

Given = list[tuple[str, NDArray[Any] | None]]
ROWS, DEPTH = 16, 32
COUNTS = [(1, 0), (16, 3), (21, 21), (45, 17)]
"""Tokens, and how many of them decode."""


def words_of(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rows of floats as words.h lays them out, zeros where there are none."""
    rows, width = (-(-size // whole) * whole for size, whole in zip(x.shape, (ROWS, DEPTH), strict=True))
    whole = np.zeros((rows, width), np.uint16)
    whole[: x.shape[0], : x.shape[1]] = to_bf16(x).reshape(x.shape)
    return np.ascontiguousarray(whole.reshape(rows // ROWS, ROWS, width // DEPTH, DEPTH).swapaxes(1, 2)).ravel()


def rows_of(words: NDArray[np.uint16], rows: int, width: int) -> NDArray[np.uint16]:
    """The numbers of each row, without what fills tiles."""
    deep = -(-width // DEPTH) * DEPTH
    return words.reshape(-1, deep // DEPTH, ROWS, DEPTH).swapaxes(1, 2).reshape(-1, deep)[:rows, :width]


def norm(library: Library, x: NDArray[np.float32], decoding: int, *outputs: str) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(2)
    residual, weight = random.normal(0, 1, x.shape), random.normal(1, 0.1, x.shape[1])
    given: Given = [
        ("x", x), ("r", residual.astype(np.float32)), ("w", weight.astype(np.float32)), ("d", np.array([decoding])),
    ]  # fmt: skip
    return run(library, "AddNorm", given, list(outputs), eps=1e-5)


@pytest.mark.parametrize("width", [576, 48, 40, 16])
@pytest.mark.parametrize(("count", "decoding"), COUNTS)
def test_a_norm_rounds_the_tokens_of_prompts(library: Path, width: int, count: int, decoding: int) -> None:
    x = np.random.default_rng(1).normal(0, 1, (count, width)).astype(np.float32)
    plain, built = norm(library, x, decoding, "y", "s"), norm(library, x, decoding, "y", "s", "words")
    assert (built["s"] == plain["s"]).all()
    assert (built["y"][:decoding] == plain["y"][:decoding]).all()
    rounded = rows_of(built["words"], count - decoding, width)
    assert (rounded == to_bf16(plain["y"][decoding:]).reshape(rounded.shape)).all()


@pytest.mark.parametrize(("count", "decoding"), COUNTS)
@pytest.mark.parametrize("half", [32, 96])
def test_a_gate_rounds_the_tokens_of_prompts(library: Path, half: int, count: int, decoding: int) -> None:
    held, _ = matrix(2 * half, 64, 32, 8, offsets=False)
    x = np.random.default_rng(1).normal(0, 1, (count, 64)).astype(np.float32)
    given: Given = [("x", x), ("w", held["gated"]), ("b", None), ("d", np.array([decoding]))]
    attrs = attributes(2 * half, 64, 32, 8, 0)
    plain = matmul(library, x, held["gated"], attrs, gated=1, decoding=decoding)
    built = run(library, "Linear", given, ["y", "-s", "words"], **attrs, gated=1)
    assert (built["y"][:decoding] == plain[:decoding]).all()
    rounded = rows_of(built["words"], count - decoding, half)
    assert (rounded == to_bf16(plain[decoding:]).reshape(rounded.shape)).all()


@pytest.mark.parametrize("width", [576, 40])
@pytest.mark.parametrize(("count", "decoding"), COUNTS)
def test_a_matmul_takes_what_is_rounded(library: Path, width: int, count: int, decoding: int) -> None:
    held, _ = matrix(48, width, 8, 8, offsets=False)
    x = np.random.default_rng(1).normal(0, 1, (count, width)).astype(np.float32)
    attrs = attributes(48, width, 8, 8, 0)
    plain = matmul(library, x, held["panels"], attrs, decoding=decoding)
    given: Given = [
        ("x", np.where(np.arange(count)[:, None] < decoding, x, np.float32(np.nan))), ("w", held["panels"]),
        ("b", None), ("d", np.array([decoding])), ("words", words_of(x[decoding:])),
    ]  # fmt: skip
    assert (run(library, "Linear", given, ["y", "-s"], **attrs, gated=0)["y"] == plain).all()


@pytest.mark.parametrize(("rows", "gated"), [(64, 0), (96, 1)])
def test_words_of_what_gives_none_are_an_error(library: Path, rows: int, gated: int) -> None:
    held, _ = matrix(rows, 64, 32, 8, offsets=False)
    given: Given = [("x", np.ones((3, 64), np.float32)), ("w", held["panels"]), ("b", None), ("d", np.array([0]))]
    with pytest.raises((Fail, InvalidArgument), match="words are results of a gate"):
        run(library, "Linear", given, ["y", "-s", "words"], **attributes(rows, 64, 32, 8, 0), gated=gated)
