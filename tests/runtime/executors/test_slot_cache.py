"""A cache of slots whose tensors differ: keys wider than values, layers of other heads, and states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from llmc.errors import InputError
from llmc.runtime.cache_shape import CacheShape, CacheTensor, key_value
from llmc.runtime.executors.slot_cache import SlotCache, TensorPart, parts_of
from llmc.runtime.step import Step

STATES = (CacheTensor(0, "conv", "state", (3, 2)), CacheTensor(2, "recurrent", "state", (2, 2, 2)))
MIXED = CacheShape(4, (STATES[0], *key_value(1, 2, 4, 6), STATES[1], *key_value(3, 1, 8)))
SLOTS, CAPACITY = 3, 8
NAN = float("nan")


def cache_of(shape: CacheShape = MIXED) -> SlotCache:
    """Bytes of nobody everywhere."""
    built = SlotCache(shape, SLOTS, CAPACITY, decode_rows=4, decode_length=CAPACITY)
    for slot in range(SLOTS):
        built.nan_fill(slot, 0, NAN)
    return built


def decode(past: Sequence[int], context: int) -> Step:
    """A step of the first slots, with a dummy row behind them."""
    rows = len(past) + 1
    ids = np.zeros((rows, 1), np.int64)
    return Step("decode", context, tuple(range(len(past))), ids, np.array([*past, 0]), np.ones(rows, np.int64))


def tokens(cache: SlotCache, first: float, count: int) -> list[np.ndarray]:
    """Parts of so many tokens, every number another one."""
    built = []
    for i, array in enumerate(cache.home.arrays):
        size = (array.shape[0], array.shape[2], count, array.shape[4])
        built.append((np.arange(np.prod(size)).reshape(size) + first + 1000 * i).astype(np.float32))
    return built


def test_tensors_of_one_size_lie_together_and_others_apart() -> None:
    plain = CacheShape.plain(3, 2, 4)
    assert parts_of(plain) == (TensorPart(6, plain.tensors[0]),)
    assert parts_of(MIXED) == tuple(TensorPart(1, t) for t in MIXED.kv)
    assert parts_of(CacheShape(4, STATES)) == ()
    assert [view.shape for view in cache_of().home.rows(1, 2)] == [(2, *t.size(2, CAPACITY)[1:]) for t in MIXED.kv]
    assert [state.shape for state in cache_of().states] == [(SLOTS, 3, 2), (SLOTS, 2, 2, 2)]


def test_what_decode_added_is_read_copied_and_laid_out_again() -> None:
    cache = cache_of()
    given = tokens(cache, 1, 2)
    cache.write(0, 0, 2, given)
    step = decode([2], context=3)
    for view in cache.begin_decode(step).rows(0, 1):
        assert not np.isnan(view[0, :, :2]).any()
        view[0, :, 2] = 7
    cache.end_decode(step)
    cache.copy(0, 2, 3)
    for part, wanted in zip(cache.read(2, 3), given, strict=True):
        np.testing.assert_array_equal(part[:, :, :2], wanted)
        assert (part[:, :, 2] == 7).all()
    for view in cache.begin_decode(decode([3], context=5)).rows(0, 1):
        assert (view[0, :, 2] == 7).all()


def test_states_of_live_rows_are_kept_and_go_where_their_tokens_go() -> None:
    cache = cache_of()
    step = decode([2, 2], context=3)
    new = [np.arange(3 * t.values, dtype=np.float32).reshape(t.size(3, 0)) for t in STATES]
    cache.keep_states(step, new)
    assert all(np.isnan(state[2]).all() for state in cache.states), "a dummy row's state reached a slot"
    cache.held.used[1] = cache._at_home[1] = 3
    cache.copy(1, 2, 3)
    given = [np.zeros_like(built) for built in new]
    cache.read_states(step, given)
    for state, built, read in zip(cache.states, new, given, strict=True):
        np.testing.assert_array_equal(state[:2], built[:2])
        np.testing.assert_array_equal(state[2], built[1])
        np.testing.assert_array_equal(read, [*built[:2], np.zeros_like(built[0])])


def test_nan_fill_from_a_token_on_leaves_states_to_their_sequence() -> None:
    cache = cache_of()
    cache.write(0, 0, 2, tokens(cache, 1, 2))
    cache.keep_states(decode([1], context=3), [np.ones(t.size(2, 0), np.float32) for t in STATES])
    cache.nan_fill(0, 2, NAN)
    assert all((state[0] == 1).all() for state in cache.states)
    assert all(not np.isnan(part).any() for part in cache.read(0, 2))
    cache.nan_fill(0, 0, NAN)
    assert all(np.isnan(state[0]).all() for state in cache.states)


def test_bytes_are_those_of_what_was_written_and_of_all_states() -> None:
    cache = SlotCache(MIXED, SLOTS, CAPACITY)
    states = SLOTS * sum(t.values for t in STATES) * 4
    assert cache.nbytes == states
    cache.write(1, 0, 2, tokens(cache, 1, 2))
    assert cache.nbytes == states + 2 * MIXED.token_values * 4


def test_a_cache_of_states_alone_counts_tokens() -> None:
    cache = cache_of(CacheShape(4, STATES))
    cache.write(0, 0, 5, [])
    assert (cache.held.used[0], cache.read(0, 5)) == (5, [])
    with pytest.raises(InputError, match="slot 0 holds 5 tokens, not 6"):
        cache.read(0, 6)


RINGS = CacheShape.plain(2, 1, 2, [4, None]).in_rings(2, 100)
LONG = 20


def test_a_ring_holds_what_later_tokens_see_and_takes_memory_for_no_more() -> None:
    """Through writes, a copy, and a start within what the ring still holds."""
    cache = SlotCache(RINGS, SLOTS, LONG)
    for slot in range(SLOTS):
        cache.nan_fill(slot, 0, NAN)
    new = [np.random.default_rng(i).random((1, 1, LONG, 2)).astype(np.float32) for i in range(len(RINGS))]
    for start, end in ((0, 3), (3, 10), (10, 11), (9, 15)):
        cache.write(1, start, end, [part[:, :, start:end] for part in new])
    cache.copy(1, 2, 15)
    for slot in (1, 2):
        for t, held, wanted in zip(RINGS, cache.read(slot, 15), new, strict=True):
            seen = t.seen(15)
            np.testing.assert_array_equal(held[:, :, seen], wanted[:, :, seen])
            assert not held[:, :, : seen.start].any()
    with pytest.raises(InputError, match="slot 2 holds its windows after 15 tokens, which cannot be taken back to 11"):
        cache.write(2, 11, 12, [part[:, :, 11:12] for part in new])
    assert cache.nbytes == SLOTS * 2 * 2 * 4 * (6 + LONG)


def test_nan_fill_spares_what_a_ring_holds_of_earlier_tokens() -> None:
    cache = SlotCache(RINGS, SLOTS, LONG)
    cache.write(0, 0, 12, [np.ones((1, 1, 12, 2), np.float32)] * 4)
    cache.nan_fill(0, 10, NAN)
    ring = cache.home.arrays[0][0, 0, 0]
    assert np.isnan(ring[[10 % 6, 11 % 6]]).all()
    assert not np.isnan(np.delete(ring, [10 % 6, 11 % 6], 0)).any()
    assert all(not np.isnan(part).any() for part in cache.read(0, 10))
