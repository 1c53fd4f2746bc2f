"""Blocks in each precision: what is written is read, and poison reaches only what nobody owns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmc.errors import DeviceError, InputError
from llmc.runtime.cache_shape import CacheShape, key_value
from llmc.runtime.executors.openvino.blocks import BLOCK, PRECISIONS, BlockCache, block_bytes, held_widths
from llmc.runtime.executors.openvino.paged_cache import GIB, PagedCache, pool_blocks

HEADS, SIZE, NARROW = 3, 16, 12
KEPT = (*key_value(0, HEADS, SIZE), *key_value(1, HEADS, SIZE, NARROW))
SHAPE = CacheShape(2, KEPT)
ALLOWED = {"f32": 0.0, "bf16": 0.02, "u8": 0.03}


def tensors(length: int) -> list[np.ndarray]:
    random = np.random.default_rng(length)
    return [random.standard_normal((HEADS, length, t.shape[1])).astype(np.float32) for t in KEPT]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("length", [0, 1, BLOCK, 2 * BLOCK + 5])
def test_what_is_written_is_read(precision: str, length: int) -> None:
    cache = BlockCache(precision, KEPT, 6)
    written = tensors(length)
    cache.write([4, 1, 5], written)
    for got, wanted in zip(cache.read([4, 1, 5], length), written, strict=True):
        assert got.shape == wanted.shape
        assert np.abs(got - wanted).max(initial=0) <= ALLOWED[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nan_fill_leaves_the_tokens_before_it(precision: str) -> None:
    cache = BlockCache(precision, KEPT, 3)
    written = tensors(40)
    cache.write([0, 1], written)
    cache.nan_fill([0, 1], 35, float("nan"))
    for got, wanted in zip(cache.read([0, 1], 35), written, strict=True):
        assert np.abs(got - wanted[:, :35]).max() <= ALLOWED[precision]
    value = cache.read([0, 1], 40)[1]
    assert np.isnan(value[:, 35:]).all()
    cache.nan_fill([2], 0, float("nan"))
    assert all(np.isnan(t).all() for t in cache.read([2], BLOCK))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_bytes_of_a_block_are_as_the_formula_says(precision: str) -> None:
    cache = BlockCache(precision, KEPT, 2)
    assert cache.block_bytes == block_bytes(precision, KEPT) == sum(t[0].nbytes for t in cache.tensors)


def test_values_narrower_than_keys_are_as_wide_in_eight_bits() -> None:
    assert held_widths("f32", KEPT) == [SIZE, SIZE, SIZE, NARROW]
    assert held_widths("u8", KEPT) == [SIZE] * 4
    wide = key_value(0, HEADS, NARROW, SIZE)
    assert held_widths("u8", wide) == [NARROW, SIZE]


def test_tokens_of_a_cache_in_float32_are_put_one_by_one() -> None:
    cache, new = BlockCache("f32", KEPT, 3), tensors(4)[0].transpose(1, 0, 2).reshape(2, 2, HEADS, SIZE)
    cache.put(0, np.array([[2, 2], [1, 0]], np.int32), np.array([[5, 6], [BLOCK - 1, 0]]), new)
    np.testing.assert_array_equal(cache.read([2], 7)[0][:, 5:], new[0].transpose(1, 0, 2))
    np.testing.assert_array_equal(cache.read([1, 0], BLOCK + 1)[0][:, BLOCK - 1 :], new[1].transpose(1, 0, 2))


def test_a_pool_has_room_for_all_slots_or_for_the_space_it_is_given() -> None:
    sizes = KEPT
    assert pool_blocks("u8", sizes, 4, 100, None) == 4 * 4
    size = block_bytes("u8", sizes)
    assert pool_blocks("u8", sizes, 4, 100, 5.5 * size / GIB) == 5
    assert pool_blocks("u8", sizes, 4, 100, 100 * size / GIB) == 16
    with pytest.raises(InputError, match=r"holds no sequence: 32 tokens take .* GiB hold one of 100 tokens, .* all 4"):
        pool_blocks("u8", sizes, 4, 100, size / GIB)


def test_rings_of_all_slots_are_counted_before_what_the_space_leaves() -> None:
    """A ring of 40 tokens is in up to three blocks."""
    windowed = tuple(replace(t, window=8, ring=40) for t in KEPT[:2])
    ring, size = block_bytes("f32", windowed), block_bytes("f32", KEPT[2:])
    mixed = (*windowed, *KEPT[2:])
    assert pool_blocks("f32", mixed, 4, 320, None) == 4 * 10
    assert pool_blocks("f32", mixed, 4, 320, (4 * 3 * ring + 7 * size) / GIB) == 7
    assert pool_blocks("f32", windowed, 4, 320, 4 * 3 * ring / GIB) == 4 * 10
    for kept, space in ((mixed, 4 * 3 * ring + size), (windowed, 4 * 3 * ring - 1)):
        with pytest.raises(InputError, match=r"holds no sequence: .* rings of windows .* GiB for 4 slots"):
            pool_blocks("f32", kept, 4, 320, space / GIB)


def test_a_space_beyond_the_memory_of_the_host_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.runtime.executors.openvino import paged_cache

    monkeypatch.setattr(paged_cache, "available_memory", lambda: 1 << 20)
    with pytest.raises(DeviceError, match=r"does not fit: .* GiB of memory are free here; ask for at most"):
        pool_blocks("f32", CacheShape.plain(30, 8, 128).kv, 8, 4096, 4)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("gib", [None, 0.5])
def test_a_cache_has_the_blocks_of_all_slots_where_they_fit(precision: str, gib: float | None) -> None:
    cache = PagedCache(precision, SHAPE, 2, 4 * BLOCK - 3, gib)
    assert (cache.tokens, cache.shared, cache.nbytes) == (8 * BLOCK, False, 8 * block_bytes(precision, KEPT))


def test_a_space_is_in_units_of_two_to_the_thirty() -> None:
    assert GIB == 1024**3
    size = block_bytes("f32", KEPT)
    cache = PagedCache("f32", SHAPE, 2, 4 * BLOCK, 5 * size / 1024**3)
    assert (cache.tokens, cache.shared, cache.nbytes) == (5 * BLOCK, True, 5 * size)
