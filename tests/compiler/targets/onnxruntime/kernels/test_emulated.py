"""Emulated intrinsics against what Intel says of each, in numpy; and the real ones, where the CPU has any."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.targets.onnxruntime.kernels import build
from llmc.runtime.host import cpu_features
from tests.compiler.targets.onnxruntime.kernels.host import EMULATED, EMULATIONS, may_tile

Array = NDArray[Any]
LANES, PAGE = 16, mmap.PAGESIZE
_FLAGS = {"emulated": EMULATIONS["amx-int8"], "real": (*build.TARGETS["amx-int8"], "-mavxvnni")}
REAL: list[Any] = (
    [pytest.param("real", marks=pytest.mark.full)] if {"avx512_vnni", "avx_vnni"} <= {*cpu_features()} else []
)
ODD = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.17e-38, 3.4e38, -3.4e38, 0.5, 1.5, 2.5, -2.5, 65519.0,
       65520.0, 65504.0, 6e-8, 3e-8, 2.0**31, -(2.0**31), 1.0, -1.0, 126.0, -149.0, 127.5, 400.0, -400.0]  # fmt: skip


KINDS = ["emulated", *REAL]
TILED = KINDS if may_tile() else ["emulated"]


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    @cache
    def of(kind: str) -> ctypes.CDLL:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "SOURCE", EMULATED)
            patch.setitem(build.TARGETS, "probe", _FLAGS[kind])
            return ctypes.CDLL(str(build.build(tmp_path_factory.mktemp("probe"), "probe")))

    return of


@pytest.fixture(params=KINDS)
def probe(request: pytest.FixtureRequest, probes: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL:
    return probes(request.param)


@pytest.fixture(params=TILED)
def tiles(request: pytest.FixtureRequest, probes: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL:
    return probes(request.param)


def call(probe: ctypes.CDLL, name: str, *given: Array, mask: int = 0, out: Array) -> Array:
    filled = [*given, *[np.zeros(LANES, np.int32)] * (3 - len(given))]
    getattr(probe, name)(*(ctypes.c_void_p(x.ctypes.data) for x in filled), mask, ctypes.c_void_p(out.ctypes.data))
    return out


def same(built: Array, wanted: Array) -> bool:
    """Equal to the bit, but for which number it is not."""
    built, wanted = np.atleast_1d(built), np.atleast_1d(wanted)
    if built.dtype.kind != "f":
        return bool((built == wanted).all())
    whole = built.view(f"u{built.itemsize}") == wanted.view(f"u{built.itemsize}")
    return bool((whole | (np.isnan(built) & np.isnan(wanted))).all())


def floats() -> list[list[Array]]:
    """Lanes of odd numbers beside each other in all pairs, and random ones."""
    random = np.random.default_rng(0)
    pairs = np.array([(x, y) for x in ODD for y in ODD], np.float32)
    third = random.permutation(np.resize(np.array(ODD, np.float32), len(pairs)))
    odd = np.concatenate([pairs, third[:, None]], 1)
    drawn = (random.normal(0, 1, (1600, 3)) * 2.0 ** random.integers(-60, 60, (1600, 3))).astype(np.float32)
    lines = np.concatenate([odd, drawn])[: (len(odd) + 1600) // LANES * LANES]
    return [[np.ascontiguousarray(x) for x in block.T] for block in lines.reshape(-1, LANES, 3)]


def ints() -> list[list[Array]]:
    random = np.random.default_rng(1)
    drawn = random.integers(-(2**31), 2**31, (40, 3, LANES)).astype(np.int32)
    drawn[::2] >>= random.integers(0, 31, drawn[::2].shape).astype(np.int32)
    # the products of bytes that are the furthest from zero
    drawn[0, 0], drawn[0, 1], drawn[1, 0], drawn[1, 1] = -1, 0x7F7F7F7F, -1, -0x7F7F7F80
    return [list(block) for block in drawn]


def scaled(a: Array, b: Array) -> Array:
    power = np.floor(b.astype(np.float64))
    limit = np.where(power == np.inf, np.inf, 0.0)
    finite = np.ldexp(a.astype(np.float64), np.nan_to_num(np.clip(power, -500, 500)).astype(int))
    built = np.where(np.isinf(power), np.where(np.isnan(a), limit, a * limit), np.where(np.isnan(power), power, finite))
    return built.astype(np.float32)


def summed(x: Array, pair: Callable[[Any, Any], Any]) -> Any:
    while len(x) > 1:
        x = pair(x[: len(x) // 2], x[len(x) // 2 :])
    return x[0]


def of_bytes(a: Array, b: Array, c: Array) -> Array:
    matmuls = a.view(np.uint8).astype(np.int64) * b.view(np.int8)
    return (matmuls.reshape(LANES, 4).sum(-1) + c).astype(np.int32)


def looked_up(a: Array, b: Array) -> Array:
    """Bytes of each quarter of a that the low bits of b's name; 0 where the highest bit is set."""
    values, requested = a.view(np.uint8).reshape(4, 16), b.view(np.uint8).reshape(4, 16)
    found = np.take_along_axis(values, (requested & 15).astype(np.int64), 1)
    return np.where(requested < 128, found, 0).astype(np.uint8).reshape(-1).view(np.int32)


def shorts_unpacked(a: Array, b: Array, first: int) -> Array:
    """Of each eight shorts of two registers the four from `first` on in turn."""
    parts = [x.view(np.uint16).reshape(4, 8)[:, first : first + 4] for x in (a, b)]
    return np.ascontiguousarray(np.stack(parts, -1)).reshape(-1).view(np.int32)


def to_bf16(x: Array) -> Array:
    """As instructions do: to the nearest, ties to even, zero below 2⁻¹²⁶, and numbers that are none as they are."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    near = np.where(np.isnan(x), bits >> 16 | 0x40, bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1) >> 16)
    return np.where(bits & 0x7F800000 == 0, bits >> 16 & 0x8000, near).astype(np.uint16)


def lower(a: Array, b: Array) -> Array:
    return np.where(a < b, a, b)


def higher(a: Array, b: Array) -> Array:
    return np.where(a > b, a, b)


def to_int(a: Array) -> Array:
    whole = np.rint(a.astype(np.float64))
    fits = (whole >= -(2.0**31)) & (whole < 2.0**31)
    return np.where(fits, np.nan_to_num(whole), -(2.0**31)).astype(np.int64).astype(np.int32)


def quarters(x: Array) -> Array:
    return x.reshape(4, 4)


def unpacked(first: int, wide: int) -> Callable[..., Array]:
    """Of each four lanes of two registers those from `first` on in turn, `wide` of them at a time."""

    def built(a: Array, b: Array, c: Array) -> Array:
        parts = [quarters(x)[:, first : first + 2].reshape(4, -1, wide) for x in (a, b)]
        return np.stack(parts, 2).reshape(-1)

    return built


def shuffled(first: int) -> Callable[..., Array]:
    chosen = [first, first + 2]
    return lambda a, b, c: np.concatenate([quarters(a)[chosen], quarters(b)[chosen]]).reshape(-1)


def bits(flags: Array) -> Array:
    return np.array([int((flags * (1 << np.arange(LANES))).sum())], np.int32)


FLOATS: dict[str, Callable[..., Array]] = {
    "min_ps": lambda a, b, c: lower(a, b), "max_ps": lambda a, b, c: higher(a, b),
    "scalef_ps": lambda a, b, c: scaled(a, b), "cvtps_epi32": lambda a, b, c: to_int(a),
    "cvtph_ps": lambda a, b, c: a.view(np.float16)[:LANES].astype(np.float32),
    "cvtps_ph": lambda a, b, c: a.astype(np.float16), "cmp_nlt": lambda a, b, c: bits(~(a < b)),
    "unpacklo_ps": unpacked(0, 1), "unpackhi_ps": unpacked(2, 1), "unpacklo_pd": unpacked(0, 2),
    "unpackhi_pd": unpacked(2, 2), "shuffle_88": shuffled(0), "shuffle_dd": shuffled(1),
    "reduce_max_ps": lambda a, b, c: np.array([summed(a, higher)]),
    "cvtne2ps_pbh": lambda a, b, c: to_bf16(np.concatenate([a, b])).view(np.int32),
    "cvtneps_pbh": lambda a, b, c: to_bf16(a).view(np.int32),
}  # fmt: skip
INTS: dict[str, Callable[..., Array]] = {
    "set1_epi32": lambda a, b, c: np.full(LANES, a[0]),
    "set1_epi8": lambda a, b, c: np.full(64, a.view(np.int8)[0]).view(np.int32),
    "and_si512": lambda a, b, c: a & b, "or_si512": lambda a, b, c: a | b, "xor_si512": lambda a, b, c: a ^ b,
    "storeu_si512": lambda a, b, c: a,
    "sub_epi8": lambda a, b, c: (a.view(np.uint8) - b.view(np.uint8)).view(np.int32),
    "setzero_si512": lambda a, b, c: np.zeros_like(a),
    "slli_epi16": lambda a, b, c: (a.view(np.uint16) << 4).astype(np.uint16).view(np.int32),
    "shuffle_epi8": lambda a, b, c: looked_up(a, b), "broadcast_i32x4": lambda a, b, c: np.tile(a[:4], 4),
    "dpbusd_epi32": of_bytes,
    "unpacklo_epi16": lambda a, b, c: shorts_unpacked(a, b, 0),
    "unpackhi_epi16": lambda a, b, c: shorts_unpacked(a, b, 4),
    "permutexvar_epi16": lambda a, b, c: b.view(np.uint16)[a.view(np.uint16) & 31].view(np.int32),
    "srli_epi16": lambda a, b, c: (a.view(np.uint16) >> 4).view(np.int32),
    "dpbusd_avx_epi32": of_bytes,
}  # fmt: skip
MASKS = [0, 1, 0x8000, 0x00FF, 0xFF00, 0xA5C3, 0x7FFF, 0xFFFF]


@pytest.mark.parametrize(("kind", "name"), [("f", n) for n in FLOATS] + [("i", n) for n in INTS], ids=str)
def test_an_intrinsic_gives_what_its_instruction_does(probe: ctypes.CDLL, kind: str, name: str) -> None:
    for given in floats() if kind == "f" else ints():
        with np.errstate(all="ignore"):
            wanted = (FLOATS if kind == "f" else INTS)[name](*given)
        built = call(probe, name, *given, out=np.zeros_like(wanted))
        assert same(built, wanted), (given, built, wanted)


@pytest.mark.parametrize("mask", MASKS, ids=hex)
def test_masks_choose_lanes(probe: ctypes.CDLL, mask: int) -> None:
    chosen = mask >> np.arange(LANES) & 1 == 1
    a, b = np.arange(1, 17, dtype=np.float32), -np.arange(1, 17, dtype=np.float32)
    out = np.zeros(LANES, np.float32)
    assert same(call(probe, "mask_blend_ps", a, b, mask=mask, out=out), np.where(chosen, b, a))
    assert same(call(probe, "maskz_mov_ps", a, mask=mask, out=out), np.where(chosen, a, 0).astype(np.float32))


def test_what_is_beyond_a_byte_is_the_largest_or_least(probe: ctypes.CDLL) -> None:
    large = np.array([-(2**31), -129, -128, -1, 0, 127, 128, 2**31 - 1] * 2, np.int32)
    narrow = np.clip(large, -128, 127).astype(np.int8)
    assert same(call(probe, "cvtsepi32_epi8", large, out=np.zeros(LANES, np.int8)), narrow)


@pytest.mark.parametrize(("rows", "depth", "columns"), [(16, 64, 16), (5, 32, 16), (16, 4, 3)])
@pytest.mark.parametrize("signed", [True, False])
def test_tiles_multiply_bytes(tiles: ctypes.CDLL, rows: int, depth: int, columns: int, signed: bool) -> None:
    random = np.random.default_rng(rows)
    a, b = (random.integers(0, 256, (16, 64)).astype(np.uint8) for _ in range(2))
    shapes = np.zeros(64, np.uint8)
    shapes[0] = 1
    for tile, (many, wide) in enumerate([(rows, 4 * columns), (rows, depth), (depth // 4, 4 * columns)]):
        shapes[48 + tile] = many
        shapes[16 + 2 * tile] = wide
    before = random.integers(-9, 9, (16, 16)).astype(np.int32)
    found = call(tiles, "tile_dots", a, b, shapes, mask=int(not signed), out=before.copy())
    given = a[:rows, :depth].view(np.int8).astype(np.int64)
    other = b[: depth // 4, : 4 * columns].reshape(depth // 4, columns, 4).transpose(0, 2, 1).reshape(depth, columns)
    wanted = before.copy()
    wanted[:rows, :columns] += (given @ (other.view(np.int8) if signed else other).astype(np.int64)).astype(np.int32)
    assert (found == wanted).all()


@pytest.mark.parametrize(("rows", "depth"), [(16, 32), (3, 6)])
def test_tiles_multiply_bfloat16(tiles: ctypes.CDLL, rows: int, depth: int) -> None:
    random = np.random.default_rng(rows)
    a, b = ((random.normal(0, 1, (16, 32)) * 2.0 ** random.integers(-8, 8, (16, 32))).astype(np.float32) for _ in "ab")
    a[0, :4], b[:, 0] = [1e-30, np.inf, np.nan, 0], 1e-30  # products that are zero, infinite, or none
    a[1], a[2] = 2.0**-100, -(2.0**-100)
    shapes = np.zeros(64, np.uint8)
    shapes[0] = 1
    for tile, (many, wide) in enumerate([(rows, 64), (rows, 2 * depth), (depth // 2, 64)]):
        shapes[48 + tile] = many
        shapes[16 + 2 * tile] = wide
    before = random.normal(0, 1, (16, 16)).astype(np.float32)
    before[1:3] = 0
    found = call(tiles, "tile_bf16", to_bf16(a), to_bf16(b), shapes, out=before.copy())
    given, other = ((to_bf16(x).astype(np.uint32) << 16).view(np.float32) for x in (a, b))
    wanted = before.copy()
    with np.errstate(all="ignore"):
        for m in range(rows):
            even, odd = np.zeros(16), np.zeros(16)
            for k in range(depth // 2):  # float64 holds what is rounded once, but for ties that it makes: none here
                even = np.float32(given[m, 2 * k] * other[k, ::2].astype(np.float64) + even).astype(np.float64)
                odd = np.float32(given[m, 2 * k + 1] * other[k, 1::2].astype(np.float64) + odd).astype(np.float64)
                even, odd = (np.where(np.abs(x) < 2.0**-126, 0, x) for x in (even, odd))
            wanted[m] = wanted[m] + (even.astype(np.float32) + odd.astype(np.float32))
    assert same(found, wanted)


def test_words_of_two_bfloat16_are_multiplied_the_second_first(probe: ctypes.CDLL) -> None:
    random = np.random.default_rng(0)
    for i in range(50):
        a, b = ((random.normal(0, 1, 32) * 2.0 ** random.integers(-8, 8, 32)).astype(np.float32) for _ in "ab")
        a[:4], b[:4] = [[1e-30, 1e-30, np.inf, np.nan], [1e-30, 1, 2, 3]]
        sums = (random.normal(0, 1, LANES) * (i > 9)).astype(np.float32)
        found = call(probe, "dpbf16_ps", to_bf16(a), to_bf16(b), sums, out=np.zeros(LANES, np.float32))
        given, other = ((to_bf16(x).astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in (a, b))
        wanted = sums
        with np.errstate(all="ignore"):
            for half in (1, 0):
                wanted = (given[half::2] * other[half::2] + wanted.astype(np.float64)).astype(np.float32)
                wanted = np.where(np.abs(wanted) < 2.0**-126, 0, wanted)
        assert same(found, wanted)


@pytest.mark.parametrize("count", [0, 1, 5, 17, 31])
def test_shorts_that_are_not_loaded_are_zero(probe: ctypes.CDLL, count: int) -> None:
    given = np.arange(1, 33, dtype=np.uint16)
    found = call(probe, "maskz_loadu_epi16_32", given, mask=count, out=np.zeros(32, np.uint16))
    assert (found == np.where(np.arange(32) < count, given, 0)).all()


@pytest.mark.parametrize("mask", [0, 1, 0x00FF, 0x01FF, 0x7FFF, 0xFFFF], ids=hex)
def test_memory_that_a_mask_leaves_out_is_not_touched(probe: ctypes.CDLL, mask: int) -> None:
    """Lanes end where a page does, behind which nothing may be read or written."""
    memory = mmap.mmap(-1, 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None)
    no_access = 0
    assert libc.mprotect(ctypes.c_void_p(start + PAGE), PAGE, no_access) == 0
    count = mask.bit_length()
    for size, load, store in ((4, "maskz_loadu_ps", "mask_storeu_ps"), (2, "maskz_loadu_epi16", "mask_storeu_epi16")):
        kind: Any = np.float32 if size == 4 else np.uint16
        edge = ctypes.c_void_p(start + PAGE - count * size)
        held = np.frombuffer(memory, kind, PAGE // size)
        held[:] = np.arange(PAGE // size)
        built, nothing = np.full(LANES, 7, kind), ctypes.c_void_p(0)
        getattr(probe, load)(edge, nothing, nothing, mask, ctypes.c_void_p(built.ctypes.data))
        assert same(built, np.concatenate([held[len(held) - count :], np.zeros(LANES - count, kind)]))
        before, given = held.copy(), np.arange(100, 100 + LANES).astype(kind)
        getattr(probe, store)(ctypes.c_void_p(given.ctypes.data), nothing, nothing, mask, edge)
        assert same(held, np.concatenate([before[: len(held) - count], given[:count]]))
    libc.mprotect(ctypes.c_void_p(start + PAGE), PAGE, mmap.PROT_READ | mmap.PROT_WRITE)


def test_each_intrinsic_of_the_sources_has_been_probed() -> None:
    intrinsics = r"_mm512_\w+|_mm256_mask\w+|_mm256_dpbusd\w+|_tile_[a-z]\w+"
    used = {name for path in (build.SOURCE / "isa").iterdir() for name in re.findall(intrinsics, path.read_text())}
    assert used - {"_mm256_maskload_ps", "_mm256_maskstore_ps"} <= set(
        re.findall(intrinsics, (EMULATED / "probe.c").read_text())
    )
    assert not any("_mm" in path.read_text() for path in build.SOURCE.glob("*.[ch]"))
