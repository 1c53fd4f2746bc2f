"""Matrices in 8 bits with a scale for each row: how near they are, and that they are made a source at a time."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from ml_dtypes import float8_e4m3fn
from numpy.typing import NDArray

from llmc.compiler.weights.recipes import LARGEST, Recipe, quantized, scales, write_weights

Floats = NDArray[np.float32]
MATRICES = arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=st.floats(-1e6, 1e6, width=32))
FORMATS = sorted(LARGEST)


class Tensors:
    """A checkpoint that remembers in which order it was read."""

    def __init__(self, **held: Floats) -> None:
        self.held, self.read = held, list[str]()

    def tensor_names(self) -> Sequence[str]:
        return list(self.held)

    def tensor(self, name: str) -> Floats:
        self.read.append(name)
        return self.held[name]

    def quantised_blocks(self, name: str) -> None:
        return None


def numbers(held: NDArray[np.int8], name: str) -> Floats:
    return (held.view(float8_e4m3fn) if name == "fp8" else held).astype(np.float32)


@given(MATRICES, st.sampled_from(FORMATS))
def test_a_code_is_the_nearest_one_and_the_largest_of_a_row_is_held(weight: Floats, name: str) -> None:
    scale = scales(weight, name)
    found = numbers(quantized(weight, scale, name), name)
    exact = weight.astype(np.float64) / scale[:, None].astype(np.float64)

    # int8 is even; e4m3 has 3 bits behind the first, and steps of 2**-9 below 2**-6
    step = 0.5 if name == "int8" else np.maximum(np.abs(exact) * 2.0**-4, 2.0**-10)
    assert np.all(np.abs(found - exact) <= step * (1 + 1e-5))
    assert np.all(np.abs(found).max(-1)[np.abs(weight).max(-1) > 1e-30] == LARGEST[name])


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_of_zeros_has_scale_one(name: str) -> None:
    weight = np.zeros((2, 3), np.float32)
    assert scales(weight, name).tolist() == [1, 1]
    assert not quantized(weight, scales(weight, name), name).any()


@pytest.mark.parametrize("name", FORMATS)
def test_a_stack_is_read_and_written_one_source_after_the_other(name: str) -> None:
    random = np.random.default_rng(0)
    source = Tensors(**{n: random.normal(size=(4, 6)).astype(np.float32) for n in "ab"})
    recipes = [Recipe(part, f"{name}_{part}", ("a", "b")) for part in ("codes", "scales")]
    out = io.BytesIO()

    placed = write_weights(recipes, source, {}, out)

    assert source.read == ["a", "b", "a", "b"]
    whole = np.concatenate([source.held["a"], source.held["b"]])
    for part, built in (("scales", scales(whole, name)), ("codes", quantized(whole, scales(whole, name), name))):
        at = placed[part]
        assert out.getvalue()[at.offset : at.offset + at.length] == built.tobytes()
