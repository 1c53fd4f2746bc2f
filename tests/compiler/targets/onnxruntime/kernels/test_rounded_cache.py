"""Attention in bfloat16, whose cache runtime/executors/onnxruntime/rounded_cache.py reads and writes too."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.runtime.bfloat16 import from_bfloat16
from llmc.runtime.executors.onnxruntime.executables import rounded
from tests.compiler.targets.onnxruntime.kernels.host import build_any, own_set
from tests.compiler.targets.onnxruntime.kernels.single import Arrays, Library, run
from tests.compiler.targets.onnxruntime.kernels.test_attention import CAPACITY, CASES, Case, in_ring
from tests.tiers import default_cases

CACHES = {"past_k": "k16", "past_v": "v16"}


@dataclass
class Rounded(Case):
    """The same in bfloat16; `given` has the numbers that the cache stands for."""

    @classmethod
    def of(cls, case: Case) -> Rounded:
        return cls(**{one.name: getattr(case, one.name) for one in fields(case)})

    def inputs(self, seed: int = 0) -> Arrays:
        given = super().inputs(seed)
        return given | {name: self.kept(given[name]) for name in CACHES}

    def run(self, library: Library, given: Arrays) -> Arrays:
        bits = {name: rounded(given[name]) for name in CACHES if given[name].dtype == np.float32}
        return run(library, "RoundedAttention", self.listed(given | bits), ["y", "k16", "v16", "-s"], **self.attributes)

    def kept(self, x: NDArray[np.floating]) -> NDArray[np.float32]:
        return from_bfloat16(rounded(x.astype(np.float32)))


MORE = {
    "many rows of one group": Rounded(3, 3, 64, [(0, 0, 200), (1, 700, 130)]),
    "rows of several tiles": Rounded(8, 2, 64, [(0, 30, 90), (1, 64, 64), (2, 127, 2)]),
    "a block that some tokens see in part": Rounded(6, 2, 32, [(0, 60, 70)], window=33),
    "values of half a tile": Rounded(4, 2, 64, [(0, 70, 60)], value_dim=48),
}
ROUNDED = {name: Rounded.of(case) for name, case in CASES.items()} | MORE


@pytest.fixture(scope="module", params=[None, "avx512-bf16"], ids=["own set", "sums in turn"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What this host runs, and what has another order of sums."""
    return build_any(tmp_path_factory.mktemp("kernels"), request.param or own_set().name)


@default_cases(14)
@pytest.mark.parametrize("name", ROUNDED)
def test_attention(library: Path, name: str) -> None:
    """Weights have 8 bits, which values of one token share, and scores differ by what queries lose."""
    case = ROUNDED[name]
    given = case.inputs()
    built, wanted = case.run(library, given), case.wanted(given)
    assert np.abs(built["y"] - wanted["y"]).max() < 3e-2
    assert np.mean(np.abs(built["y"] - wanted["y"])) < 1e-3
    np.testing.assert_array_equal(built["v16"], rounded(wanted["v2"]))
    assert np.mean(built["k16"] != rounded(wanted["k2"])) < 1e-3


@pytest.mark.parametrize(("window", "more"), [(0, False), (70, True), (600, False)])
def test_a_token_gets_the_same_whatever_it_is_computed_with(library: Path, window: int, more: bool) -> None:
    together = Rounded(9, 3, 64, [(3, 1030, 1), (1, 500, 40), (0, 0, 30), (2, 63, 1)], window=window,
                       softcap=5.0 * more, sinks=more)  # fmt: skip
    given = together.inputs()
    wanted = together.run(library, given)
    for slot, past, first, count in given["rows"].tolist():
        caches = {name: rounded(given[name]) for name in CACHES}
        for i in range(count):
            one = given | caches | {"q": given["q"][:, first + i : first + i + 1]}
            one["rows"] = np.array([[slot, past + i, 0, 1]], np.int64)
            built = together.run(library, one)
            np.testing.assert_array_equal(built["y"][0, 0], wanted["y"][0, first + i])
            caches = {name: built[new] for name, new in CACHES.items()}


@pytest.mark.parametrize(("window", "offsets"), [(5, 64), (70, 128), (600, 640)])
def test_a_ring_gives_what_a_place_for_each_token_gives(library: Path, window: int, offsets: int) -> None:
    case = Rounded(2, 1, 64, [(3, 1030, 1), (1, 500, 40), (0, 0, 30)], window=window)
    given = case.inputs()
    wanted, built = case.run(library, given), case.run(library, in_ring(case, given, offsets))
    np.testing.assert_array_equal(built["y"], wanted["y"])


def unlike(width: int) -> NDArray[np.float32]:
    """Vectors that are rounded in unlike ways, [n, width]."""
    random = np.random.default_rng(width)
    normal = random.normal(0, 1, (12, width)).astype(np.float32)
    normal[:6] *= np.float32(10.0) ** np.arange(-37, 35, 12, np.float32)[:, None]
    normal[6, -1], normal[7, 0], normal[8, width // 2] = np.nan, np.inf, -np.inf
    normal[9, :4] = [3.4e38, -3.4e38, 3.39e38, 1e-42]
    normal[10] = 1 + (2 * np.arange(width) + 1) / 256  # halves, ties to even
    return normal


@pytest.mark.parametrize("width", [64, 37, 8])
def test_the_operator_writes_what_numpy_writes(library: Path, width: int) -> None:
    x = unlike(width)
    case = Rounded(1, 1, width, [(0, 3, len(x))], packed=False, turned=0)
    built = case.run(library, case.inputs() | {"k": x[None], "v": x[None, ::-1]})
    np.testing.assert_array_equal(built["k16"][0, 0, 3 : 3 + len(x)], rounded(x))
    np.testing.assert_array_equal(built["v16"][0, 0, 3 : 3 + len(x)], rounded(x[::-1]))


def test_what_is_read_and_written_again_is_the_same() -> None:
    bits = rounded(unlike(96))
    np.testing.assert_array_equal(rounded(from_bfloat16(bits)), bits)
    assert not np.isinf(from_bfloat16(bits)).any()


@pytest.mark.parametrize(("name", "value"), [("k", np.nan), ("k", np.inf), ("v", np.nan), ("v", np.inf), ("v", 3.4e38)])
def test_what_is_no_number_shows_in_its_row_alone(library: Path, name: str, value: float) -> None:
    case = Rounded(4, 2, 32, [(1, 64, 20), (0, 600, 1)], packed=False)
    given = case.inputs()
    clean = case.run(library, given)["y"]
    given[name] = given[name].copy()
    given[name][0, 7, 5] = value  # of the first group of two heads
    heads = case.run(library, given)["y"][0].reshape(-1, 4, 32)
    seen = heads[7:20, :2] if name == "k" else heads[7:20, :2, 5]
    assert np.isnan(seen).all(), "for this token, and for those that see it"
    assert np.isfinite(heads[7:20, 2:]).all()
    np.testing.assert_array_equal(heads[20].ravel(), clean[0, 20])


def test_what_is_behind_a_row_in_its_slot_does_not_matter(library: Path) -> None:
    case = Rounded(9, 3, 64, [(0, 100, 1), (1, 40, 30), (3, CAPACITY - 20, 20)])
    given = case.inputs()
    clean = case.run(library, given)["y"]
    for cache in CACHES:
        for slot, past, _, _ in given["rows"].tolist():
            given[cache][slot, :, past:] = np.nan
        given[cache][2] = np.nan
    np.testing.assert_array_equal(case.run(library, given)["y"], clean)
