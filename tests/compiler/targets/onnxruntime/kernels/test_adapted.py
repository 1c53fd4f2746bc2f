"""What adapters add to products: each token gets its own adapter's ranks, and reads no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.targets.onnxruntime.kernels.panels import line, lora
from tests.compiler.targets.onnxruntime.kernels.single import Library, run

ENDS = [0, 3, 3, 24, 29]
"""Of adapters with 3, 0, 21 and 5 ranks, of 32."""
Arrays = dict[str, NDArray[Any]]


class Source:
    """A checkpoint of an A and of two B."""

    def __init__(self, width: int, rows: int) -> None:
        random = np.random.default_rng(width)
        self.held = {
            "a": random.normal(0, 1, (32, width)), "b": random.normal(0, 1, (rows - 9, 32)),
            "c": random.normal(0, 1, (9, 32)),
        }  # fmt: skip

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self.held[name].astype(np.float32)


def given(tokens: int, width: int, rows: int) -> Arrays:
    random = np.random.default_rng(tokens)
    parts = lora(["a", "b", "c"], Source(width, rows), 0)  # type: ignore[arg-type]
    return {
        "base": random.normal(0, 1, (1, tokens, rows)).astype(np.float32),
        "x": random.normal(0, 1, (1, tokens, width)).astype(np.float32),
        "adapters": random.permutation(np.arange(tokens) % len(ENDS))[None], **parts, "ends": np.array(ENDS),
    }  # fmt: skip


def built(library: Library, inputs: Arrays) -> NDArray[np.float32]:
    order = ("base", "x", "adapters", "low", "high", "scales", "ends")
    return run(library, "Adapted", [(name, inputs[name]) for name in order], ["y", "-s"])["y"]


def expected(inputs: Arrays) -> NDArray[np.float64]:
    x, base = inputs["x"][0].astype(np.float64), inputs["base"][0].astype(np.float64)
    low, high = (inputs[part].view(np.int8).astype(np.float64) for part in ("low", "high"))
    matmuls = x @ low[:, : x.shape[1]].T * inputs["scales"]
    for token, adapter in enumerate(inputs["adapters"][0]):
        kept = range(ENDS[adapter - 1], ENDS[adapter]) if adapter else ()
        matmuls[token, np.isin(np.arange(32), list(kept), invert=True)] = 0
    return base + matmuls @ high[:, : base.shape[1]]


@pytest.mark.parametrize(("tokens", "width", "rows"), [(1, 64, 64), (7, 83, 21), (40, 576, 200), (5, 5, 130)])
def test_each_token_has_its_adapter(library: Path, tokens: int, width: int, rows: int) -> None:
    inputs = given(tokens, width, rows)
    y = built(library, inputs)[0]
    np.testing.assert_allclose(y, expected(inputs), atol=2e-5 * width**0.5)
    none = inputs["adapters"][0] == 0
    assert (y[none] == inputs["base"][0, none]).all(), "bit by bit"


def test_quantized_weights_are_those_of_the_matrices() -> None:
    source = Source(83, 21)
    parts = lora(["a", "b", "c"], source, 0)  # type: ignore[arg-type]
    assert parts["low"].shape == (32, line(83)) == (32, 96)
    low, high = (parts[part].view(np.int8).astype(np.float32) for part in ("low", "high"))
    exact = source.tensor("a")[:, :, None] * np.concatenate([source.tensor("b"), source.tensor("c")]).T[:, None]
    near = parts["scales"][:, None, None] * low[:, :83, None] * high[:, None, :21]
    assert np.abs(near - exact).max() < 0.01 * np.abs(exact).max()


def test_others_matrices_are_not_read(library: Path) -> None:
    """What is no number in another adapter's scales, or in another token, does not spread."""
    inputs = given(9, 83, 40)
    clean = built(library, inputs)
    inputs["scales"] = inputs["scales"].copy()
    inputs["scales"][5] = np.nan
    inputs["x"] = inputs["x"].copy()
    token = int(np.flatnonzero(inputs["adapters"][0] == 4)[0])
    inputs["x"][0, token, 82] = np.nan
    y = built(library, inputs)[0]
    touched = (inputs["adapters"][0] == 3) | (np.arange(9) == token)
    assert np.isnan(y[touched]).all()
    assert (y[~touched] == clean[0, ~touched]).all()
