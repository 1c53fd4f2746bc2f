"""Attention over rows that lie end to end, against the same arithmetic in float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from tests.compiler.targets.onnxruntime.kernels.single import Arrays, Library, run
from tests.tiers import default_cases

Array = NDArray[np.float32]
CAPACITY = 1100


@dataclass
class Case:
    """Heads, and rows of (slot, past, tokens)."""

    heads: int
    kv_heads: int
    dim: int
    rows: list[tuple[int, int, int]]
    slots: int = 4
    window: int = 0
    turned: int | None = None
    """Values of a head that turn; None: all."""

    value_dim: int | None = None
    """Width of values; None: as that of keys."""

    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    offsets: int = 0
    """What scores grow by is given for so many places, and not as a slope."""

    packed: bool = True
    spare: int = 0
    """Tokens of no row, behind the others."""

    def inputs(self, seed: int = 0) -> Arrays:
        random = np.random.default_rng(seed)
        tokens = sum(n for _, _, n in self.rows) + self.spare
        parts = [random.normal(0, 1, (1, tokens, width)).astype(np.float32) for width in self.widths]
        cache = (self.slots, self.kv_heads, CAPACITY)
        given: Arrays = {"q": np.concatenate(parts, -1)} if self.packed else dict(zip("qkv", parts, strict=True))
        for name, width in (("past_k", self.dim), ("past_v", self.values)):
            given[name] = random.normal(0, 1, (*cache, width)).astype(np.float16)
        given |= {name: random.normal(0, 1, self.heads).astype(np.float32) for name in ("sinks", "slopes")}
        if self.offsets:
            given["slopes"] = random.normal(0, 1, (self.heads, self.offsets)).astype(np.float32)
        firsts = np.cumsum([0, *(n for _, _, n in self.rows)])
        listed = [(slot, past, firsts[i], n) for i, (slot, past, n) in enumerate(self.rows)]
        given["rows"] = np.array(listed, np.int64).reshape(-1, 4)
        half = (self.dim if self.turned is None else self.turned) // 2
        if half:
            angles = np.arange(CAPACITY)[:, None] * 100.0 ** (-np.arange(half) / half)
            given |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
        return {name: x for name, x in given.items() if getattr(self, name, True) or name == "rows"}

    @property
    def values(self) -> int:
        return self.value_dim or self.dim

    @property
    def widths(self) -> tuple[int, int, int]:
        return self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.values

    @property
    def attributes(self) -> dict[str, int | float]:
        return {
            "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.dim, "value_dim": self.values,
            "window": self.window, "scale": self.dim**-0.5, "softcap": self.softcap,
        }  # fmt: skip

    def listed(self, given: Arrays) -> list[tuple[str, NDArray[Any] | None]]:
        names = ["q", "k", "v", "past_k", "past_v", "rows", "cos", "sin", "sinks", "slopes"]
        while names[-1] not in given:
            names.pop()
        return [(name, given.get(name)) for name in names]

    def run(self, library: Library, given: Arrays) -> Arrays:
        return run(library, "Attention", self.listed(given), ["y", "k2", "v2", "-s"], **self.attributes)

    def kept(self, x: NDArray[np.floating]) -> NDArray[np.float32]:
        """As the cache holds it, but for float16's rounding."""
        return x.astype(np.float32)

    def wanted(self, given: Arrays) -> Arrays:
        if self.packed:
            q, k, v = np.split(given["q"][0], np.cumsum(self.widths)[:2], axis=-1)
        else:
            q, k, v = (given[name][0] for name in "qkv")
        dims = (self.heads, self.dim), (self.kv_heads, self.dim), (self.kv_heads, self.values)
        q, k, v = (x.reshape(len(x), *size).astype(np.float64) for x, size in zip((q, k, v), dims, strict=True))
        keys, values = given["past_k"].copy(), given["past_v"].copy()
        y = np.zeros((len(q), self.heads, self.values))
        for slot, past, first, count in [row for row in given["rows"].tolist() if row[3]]:
            at = np.arange(past, past + count)
            keys[slot, :, at] = self.kept(self._turn(k[first : first + count], at, given))
            values[slot, :, at] = self.kept(v[first : first + count])
            queries = self._turn(q[first : first + count], at, given)
            for h in range(self.heads):
                own = slot, h // (self.heads // self.kv_heads)
                scores = queries[:, h] @ keys[own][: past + count].astype(np.float64).T * self.dim**-0.5
                if self.softcap:
                    scores = self.softcap * np.tanh(scores / self.softcap)
                if self.slopes:
                    each = given["slopes"][h]
                    scores = scores + (each[: past + count] if self.offsets else each * np.arange(past + count))
                distance = at[:, None] - np.arange(past + count)[None]
                seen = (distance >= 0) & ((distance < self.window) if self.window else True)
                scores = np.where(seen, scores, -np.inf)
                sink = np.full((count, 1), given["sinks"][h] if self.sinks else -np.inf)
                shares = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), sink))
                shares /= shares.sum(-1, keepdims=True) + np.exp(sink - np.maximum(scores.max(-1, keepdims=True), sink))
                y[first : first + count, h] = shares @ values[own][: past + count].astype(np.float64)
        return {"y": y.reshape(1, len(q), -1).astype(np.float32), "k2": keys, "v2": values}

    def _turn(self, x: NDArray[np.float64], at: NDArray[np.int64], given: Arrays) -> NDArray[np.float64]:
        if "cos" not in given:
            return x
        cos, sin = (given[name][at][:, None].astype(np.float64) for name in ("cos", "sin"))
        half = cos.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


CASES = {
    "one token": Case(9, 3, 64, [(1, 95, 1)]),
    "the first token": Case(9, 3, 64, [(0, 0, 1)]),
    "keys shared out": Case(9, 3, 64, [(2, 1000, 1)]),
    "keys shared out, two rows": Case(4, 1, 64, [(2, 1000, 1), (0, 3, 1)]),
    "decode, slots in any order": Case(9, 3, 64, [(3, 95, 1), (0, 17, 1), (2, 700, 1), (1, 64, 1)]),
    "a prompt": Case(9, 3, 64, [(0, 0, 70)]),
    "a chunk over a past": Case(9, 3, 64, [(0, 130, 33)]),
    "prompts and decode": Case(6, 2, 64, [(3, 95, 1), (1, 0, 50), (0, 200, 7), (2, 63, 1)]),
    "drafted tokens": Case(9, 3, 64, [(0, 300, 5), (1, 20, 5)]),
    "tokens of no row": Case(4, 2, 32, [(0, 10, 3)], spare=4),
    "no rows": Case(4, 2, 32, [], spare=2),
    "a window": Case(4, 2, 32, [(0, 300, 1), (1, 90, 40)], window=70),
    "a window shorter than a block": Case(4, 2, 32, [(0, 0, 60), (1, 400, 1)], window=5),
    "a window, keys shared out": Case(2, 1, 64, [(0, 1050, 1)], window=900),
    "no groups": Case(4, 4, 16, [(0, 40, 9)]),
    "large groups": Case(40, 1, 32, [(0, 40, 3), (1, 2, 1)]),
    "wide heads": Case(4, 2, 256, [(0, 70, 11), (1, 2, 1)]),
    "128 wide": Case(4, 1, 128, [(0, 70, 11), (1, 99, 1)]),
    "72 wide": Case(4, 2, 72, [(0, 70, 11), (1, 99, 1)]),
    "8 wide, without groups": Case(2, 2, 8, [(0, 70, 11), (1, 99, 1)]),
    "of an odd width": Case(4, 2, 37, [(0, 70, 11), (1, 99, 1)], turned=20),
    "512 wide": Case(4, 2, 512, [(0, 70, 11), (1, 99, 1)]),
    "values narrower than keys": Case(4, 2, 192, [(0, 70, 11), (1, 99, 1)], value_dim=128, turned=64),
    "values wider than keys, apart": Case(4, 2, 24, [(0, 70, 11), (1, 99, 1)], value_dim=40, packed=False),
    "groups of more heads than are done at once": Case(142, 2, 64, [(0, 40, 3), (1, 2, 1)]),
    "such groups, keys shared out": Case(71, 1, 64, [(2, 0, 0), (1, 1000, 1)]),
    "scores that are capped": Case(4, 2, 64, [(0, 70, 11), (1, 99, 1)], softcap=1.5),
    "sinks": Case(4, 2, 64, [(0, 70, 11), (1, 99, 1), (2, 0, 1)], sinks=True, window=20),
    "sinks, keys shared out": Case(2, 1, 64, [(0, 1050, 1)], sinks=True),
    "ALiBi": Case(4, 2, 64, [(0, 70, 11), (1, 99, 1)], slopes=True, turned=0),
    "scores that grow by a table": Case(4, 2, 64, [(0, 70, 11), (1, 99, 1)], slopes=True, offsets=100, turned=0),
    "such, keys shared out": Case(2, 1, 64, [(0, 1050, 1)], slopes=True, offsets=1051, turned=0),
    "all of it": Case(6, 2, 40, [(0, 70, 11), (1, 600, 1)], value_dim=24, softcap=2.0, sinks=True, slopes=True,
                      window=80, turned=16),
    "heads that turn in part": Case(4, 2, 64, [(0, 70, 11)], turned=32),
    "heads that do not turn": Case(4, 2, 64, [(0, 70, 11)], turned=0),
    "keys and values apart": Case(4, 2, 64, [(0, 70, 11), (1, 5, 1)], packed=False),
}  # fmt: skip


@default_cases(14)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention(library: Path, case: Case) -> None:
    given = case.inputs()
    built, wanted = case.run(library, given), case.wanted(given)
    assert np.abs(built["y"] - wanted["y"]).max() < 2e-3  # a key that float16 rounds the other way
    assert np.mean(np.abs(built["y"] - wanted["y"])) < 2e-5
    for cache in ("k2", "v2"):
        apart = np.abs(built[cache].astype(np.float32) - wanted[cache].astype(np.float32))
        assert apart.max() < 3e-3
        assert np.mean(apart > 0) < 1e-3


@pytest.mark.parametrize(("window", "more"), [(0, False), (70, True), (600, False)])
def test_a_token_gets_the_same_whatever_it_is_computed_with(library: Path, window: int, more: bool) -> None:
    together = Case(9, 3, 64, [(3, 1030, 1), (1, 500, 40), (0, 0, 30), (2, 63, 1)], window=window,
                    softcap=5.0 * more, sinks=more)  # fmt: skip
    given = together.inputs()
    wanted = together.run(library, given)
    for slot, past, first, count in given["rows"].tolist():
        caches = {name: given[name].copy() for name in ("past_k", "past_v")}
        for i in range(count):
            one = given | caches | {"q": given["q"][:, first + i : first + i + 1]}
            one["rows"] = np.array([[slot, past + i, 0, 1]], np.int64)
            built = together.run(library, one)
            assert (built["y"][0, 0] == wanted["y"][0, first + i]).all(), (slot, past + i)
            caches = {"past_k": built["k2"], "past_v": built["v2"]}


def in_ring(case: Case, given: Arrays, offsets: int) -> Arrays:
    """The caches of `given` in rings, with NaN where the window of a row's first token does not reach."""
    built = dict(given)
    for name in ("past_k", "past_v"):
        held = given[name]
        built[name] = np.full((*held.shape[:2], offsets, held.shape[3]), np.nan, held.dtype)
        for slot, past, _ in case.rows:
            tokens = np.arange(max(0, past - case.window + 1), past)
            built[name][slot][:, tokens % offsets] = held[slot][:, tokens]
    return built


@pytest.mark.parametrize("rows", [[(3, 1030, 1), (1, 500, 40), (0, 0, 30), (2, 63, 1)], [(2, 1050, 1)]], ids=len)
@pytest.mark.parametrize(("window", "offsets"), [(5, 64), (70, 128), (600, 640), (900, 960)])
def test_a_ring_gives_what_a_place_for_each_token_gives(
    library: Path, rows: list[tuple[int, int, int]], window: int, offsets: int
) -> None:
    case = Case(2, 1, 64, rows, window=window, sinks=True)
    given = case.inputs()
    wanted, built = case.run(library, given), case.run(library, in_ring(case, given, offsets))
    np.testing.assert_array_equal(built["y"], wanted["y"])
    for slot, past, count in rows:
        tokens = np.arange(max(0, past + count - window + 1), past + count)
        for cache in ("k2", "v2"):
            np.testing.assert_array_equal(built[cache][slot][:, tokens % offsets], wanted[cache][slot][:, tokens])


@pytest.mark.parametrize(("offsets", "count"), [(128, 60), (100, 1), (64, 1), (0, 1)])
def test_a_row_that_its_ring_has_no_room_for_is_refused(library: Path, offsets: int, count: int) -> None:
    case = Case(2, 1, 64, [(0, 200, count)], window=70)
    given = case.inputs()
    with pytest.raises(InvalidArgument, match="a row's window and its new tokens do not fit the ring of its cache"):
        case.run(library, given | {name: given[name][:, :, :offsets] for name in ("past_k", "past_v")})


def test_what_is_behind_a_row_in_its_slot_does_not_matter(library: Path) -> None:
    case = Case(9, 3, 64, [(0, 100, 1), (1, 40, 30)])
    given = case.inputs()
    clean = case.run(library, given)["y"]
    for slot, past, _, count in given["rows"].tolist():
        for cache in ("past_k", "past_v"):
            given[cache][slot, :, past + count :] = np.nan
            given[cache][2:] = np.nan
    assert (case.run(library, given)["y"] == clean).all()


@pytest.mark.parametrize(
    "row", [(4, 0, 0, 1), (-1, 0, 0, 1), (0, -1, 0, 1), (0, CAPACITY, 0, 1), (0, 0, 1, 1), (0, 0, 0, 2)], ids=str
)
def test_a_row_that_cannot_be_is_refused(library: Path, row: tuple[int, int, int, int]) -> None:
    case = Case(4, 2, 32, [(0, 0, 1)])
    given = case.inputs() | {"rows": np.array([row], np.int64)}
    with pytest.raises(InvalidArgument, match="a row is outside of the tokens, the slots, the cache or the rotary"):
        case.run(library, given)


def test_heads_of_another_size_are_refused(library: Path) -> None:
    case = Case(4, 2, 513, [(0, 0, 1)])
    with pytest.raises(Exception, match="heads of this number or size are not supported"):
        case.run(library, case.inputs())
