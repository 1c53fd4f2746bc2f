"""Attention over a cache in 8 bits, whose lines runtime/executors/onnxruntime/coded_cache.py reads and writes too."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.runtime.executors.onnxruntime.executables import decoded, encoded
from tests.compiler.targets.onnxruntime.kernels.single import Arrays, Library, run
from tests.compiler.targets.onnxruntime.kernels.test_attention import CASES, Case
from tests.tiers import default_cases

CACHES = {"past_k": "k8", "past_v": "v8"}


@dataclass
class Coded(Case):
    """The same over lines; `given` has the numbers that they stand for."""

    @classmethod
    def of(cls, case: Case) -> Coded:
        return cls(**{one.name: getattr(case, one.name) for one in fields(case)})

    def inputs(self, seed: int = 0) -> Arrays:
        given = super().inputs(seed)
        return given | {name: self.kept(given[name]) for name in CACHES}

    def run(self, library: Library, given: Arrays) -> Arrays:
        lines = {name: encoded(given[name]) for name in CACHES if given[name].dtype == np.float32}
        return run(library, "CodedAttention", self.listed(given | lines), ["y", "k8", "v8", "-s"], **self.attributes)

    def kept(self, x: NDArray[np.floating]) -> NDArray[np.float32]:
        return decoded(encoded(x.astype(np.float32)))


CODED = {name: Coded.of(case) for name, case in CASES.items()}
UNLIKE = ("keys shared out, two rows", "prompts and decode", "a window", "of an odd width", "all of it")
"""Cases that no two of take one way through the operator."""


@default_cases(9)
@pytest.mark.parametrize("name", CODED)
def test_attention(library: Path, name: str) -> None:
    case = CODED[name]
    given = case.inputs()
    built, wanted = case.run(library, given), case.wanted(given)
    assert np.abs(built["y"] - wanted["y"]).max() < 2e-2  # a key whose code is rounded the other way
    assert np.mean(np.abs(built["y"] - wanted["y"])) < 5e-5
    np.testing.assert_array_equal(built["v8"], encoded(wanted["v2"]))
    assert np.mean(built["k8"] != encoded(wanted["k2"])) < 1e-3


def test_a_token_gets_the_same_whatever_it_is_computed_with(library: Path) -> None:
    together = Coded(9, 3, 64, [(3, 1030, 1), (1, 500, 12), (0, 0, 9), (2, 63, 1)])
    given = together.inputs()
    wanted = together.run(library, given)
    for slot, past, first, count in given["rows"].tolist():
        caches = {name: encoded(given[name]) for name in CACHES}
        for i in range(count):
            one = given | caches | {"q": given["q"][:, first + i : first + i + 1]}
            one["rows"] = np.array([[slot, past + i, 0, 1]], np.int64)
            built = together.run(library, one)
            np.testing.assert_array_equal(built["y"][0, 0], wanted["y"][0, first + i])
            caches = {name: built[new] for name, new in CACHES.items()}
    for name, new in CACHES.items():
        np.testing.assert_array_equal(caches[name][slot], wanted[new][slot])


def unlike(width: int) -> NDArray[np.float32]:
    """Vectors that are coded in unlike ways, [n, width]."""
    random = np.random.default_rng(width)
    normal = random.normal(0, 1, (24, width)).astype(np.float32)
    normal[:16] *= np.float32(10.0) ** np.arange(-36, 28, 4, np.float32)[:, None]
    normal[16, -1], normal[17, 0], normal[18, width // 2] = np.nan, np.inf, -np.inf
    normal[19] = 0
    normal[20] = np.where(np.arange(width) % 3 == 0, 3.4e38, -3.4e38)
    normal[21] = np.where(np.arange(width) == width - 1, -1e4, 1e-3)
    normal[22] = np.arange(width) + 0.5  # halves, ties to even
    normal[22, 0] = 127
    normal[23] = 1e-42
    return normal


@pytest.mark.parametrize("width", [64, 37, 8])
def test_the_operator_writes_what_numpy_writes(library: Path, width: int) -> None:
    x = unlike(width)
    case = Coded(1, 1, width, [(0, 3, len(x))], packed=False, turned=0)
    built = case.run(library, case.inputs() | {"k": x[None], "v": x[None, ::-1]})
    np.testing.assert_array_equal(built["k8"][0, 0, 3 : 3 + len(x)], encoded(x))
    np.testing.assert_array_equal(built["v8"][0, 0, 3 : 3 + len(x)], encoded(x[::-1]))


def test_a_line_is_near_its_numbers_and_read_and_written_again_the_same() -> None:
    x = unlike(96)
    lines = encoded(x)
    np.testing.assert_array_equal(encoded(decoded(lines)), lines)
    finite = np.isfinite(x).all(-1)
    assert np.isnan(decoded(lines)[~finite]).all()
    x, read = x[finite], decoded(lines)[finite]
    step = np.abs(x).max(-1, keepdims=True) / 127
    assert (np.abs(x - read) <= np.where(step < 1e-30, 127.01 * step, 0.503 * step)).all()


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_shows_in_its_row_alone(library: Path, name: str, value: float) -> None:
    case = Coded(4, 2, 32, [(1, 64, 20), (0, 600, 1)], packed=False)
    given = case.inputs()
    clean = case.run(library, given)["y"]
    given[name] = given[name].copy()
    given[name][0, 7, 5] = value  # of the first group of two heads
    heads = case.run(library, given)["y"][0].reshape(-1, 4, 32)
    assert np.isnan(heads[7:20, :2]).all(), "for this token, and for those that see it"
    assert np.isfinite(heads[7:20, 2:]).all()
    np.testing.assert_array_equal(heads[20].ravel(), clean[0, 20])


def test_what_is_behind_a_row_in_its_slot_does_not_matter(library: Path) -> None:
    case = Coded(9, 3, 64, [(0, 100, 1), (1, 40, 30)])
    given = case.inputs()
    clean = case.run(library, given)["y"]
    for cache in CACHES:
        for slot, past, _, _ in given["rows"].tolist():
            given[cache][slot, :, past:] = np.nan
        given[cache][2:] = np.nan
    np.testing.assert_array_equal(case.run(library, given)["y"], clean)
