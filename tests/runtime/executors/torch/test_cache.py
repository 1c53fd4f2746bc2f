"""The cache as torch tensors: keys and values by token, states by sequence, each of its own shape and dtype."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from llmc.runtime.cache_shape import CacheShape, CacheTensor, key_value  # noqa: E402
from llmc.runtime.executors.torch.cache import TorchCache  # noqa: E402
from llmc.runtime.step import Step  # noqa: E402

SHAPE = CacheShape(2, (CacheTensor(0, "conv", "state", (3, 2), dtype="f32"), *key_value(1, 2, 4, 6)))
SLOTS, CAPACITY = 4, 8


def step(slots: tuple[int, ...], past: list[int], new: list[int], context: int) -> Step:
    """A step with one dummy row behind the live ones."""
    rows = len(slots) + 1
    ids = np.zeros((rows, max(new)), np.int64)
    return Step("prompt", context, slots, ids, np.array([*past, 0]), np.array([*new, 1]))


def built(rows: int, query: int, first: float) -> list[torch.Tensor]:
    """What a bfloat16 program gives, every number another one."""
    found = []
    for i, t in enumerate(SHAPE):
        size = t.size(rows, query)
        numbers = torch.arange(np.prod(size), dtype=torch.float32).reshape(size) + first + 1000 * i
        found.append(numbers.bfloat16() if t.kind == "kv" else numbers)
    return found


@pytest.fixture
def cache() -> TorchCache:
    """Bytes of nobody everywhere."""
    found = TorchCache(SHAPE, SLOTS, CAPACITY, torch.bfloat16)
    for slot in range(SLOTS):
        found.nan_fill(slot, 0, float("nan"))
    return found


def test_each_tensor_has_its_own_shape_and_dtype(cache: TorchCache) -> None:
    assert cache.nbytes == SLOTS * (3 * 2 * 4 + CAPACITY * (2 * 4 + 2 * 6) * 2)
    given = cache.past(step((2, 0), [0, 0], [1, 1], 5))
    assert [tuple(t.shape) for t in given] == [(3, 3, 2), (3, 2, 5, 4), (3, 2, 5, 6)]
    assert [t.dtype for t in given] == [torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("slots", [(1, 2), (2, 0)], ids=["views", "copies"])
def test_live_rows_keep_their_live_tokens_and_states_and_dummy_rows_nothing(
    cache: TorchCache, slots: tuple[int, ...]
) -> None:
    new = built(3, 3, 1.0)
    cache.append(step(slots, [0, 0], [3, 2], 0), new)
    for row, (slot, count) in enumerate(zip(slots, (3, 2), strict=True)):
        state, key, value = cache.read(slot, CAPACITY)
        np.testing.assert_array_equal(state, new[0][row])
        for kept, tensor in ((key, new[1]), (value, new[2])):
            np.testing.assert_array_equal(kept[:, :count], tensor[row, :, :count].float())
            assert np.isnan(kept[:, count:]).all()
    for slot in set(range(SLOTS)) - set(slots):
        assert all(np.isnan(array).all() for array in cache.read(slot, CAPACITY))


def test_a_copy_has_the_tokens_requested_and_the_states(cache: TorchCache) -> None:
    cache.append(step((0,), [0], [3], 0), built(2, 3, 1.0))
    cache.copy(0, 3, 3)
    for one, other in zip(cache.read(0, 3), cache.read(3, 3), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_was_read_can_be_written_to_another_slot(cache: TorchCache) -> None:
    cache.append(step((0,), [0], [3], 0), built(2, 3, 1.0))
    cache.write(1, 3, cache.read(0, 3))
    for one, other in zip(cache.read(0, 3), cache.read(1, 3), strict=True):
        np.testing.assert_array_equal(one, other)


def test_nan_fill_behind_tokens_leaves_the_state_that_they_built(cache: TorchCache) -> None:
    cache.append(step((0,), [0], [3], 0), built(2, 3, 1.0))
    cache.nan_fill(0, 2, float("nan"))
    state, key, _ = cache.read(0, CAPACITY)
    assert np.isfinite(state).all() and np.isfinite(key[:, :2]).all() and np.isnan(key[:, 2:]).all()


RINGS = CacheShape.plain(2, 1, 2, [4, None]).in_rings(2, 100)


def test_a_ring_keeps_the_last_tokens_of_rows_of_any_length() -> None:
    """Beside a cache of all tokens: prompts longer than a ring, over each other's ends, and a dummy row."""
    rings, whole = (TorchCache(shape, SLOTS, 40, torch.float32) for shape in (RINGS, RINGS.without_rings))
    for slot in range(SLOTS):
        rings.nan_fill(slot, 0, float("nan"))
    past, random = np.zeros(2, np.int64), torch.Generator().manual_seed(0)
    for new in ([9, 2], [1, 1], [3, 7], [1, 8]):
        taken = [torch.rand((3, 1, max(new), 2), generator=random) for _ in RINGS]
        for one in (rings, whole):
            one.append(step((2, 0), [int(n) for n in past], new, 0), taken)
        past += new
    for slot, length in zip((2, 0), past, strict=True):
        for t, held, kept in zip(RINGS, rings.read(slot, length), whole.read(slot, length), strict=True):
            seen = np.array(t.seen(length))
            np.testing.assert_array_equal(held[:, seen], kept[:, seen])
    given = rings.past(step((2, 0), [int(n) for n in past], [1, 1], 24))
    assert [tuple(t.shape) for t in given] == [(3, 1, 6, 2), (3, 1, 6, 2), (3, 1, 24, 2), (3, 1, 24, 2)]
    rings.write(1, 14, rings.read(2, 14))
    for one, other in zip(rings.read(1, 14), rings.read(2, 14), strict=True):
        np.testing.assert_array_equal(one, other)
    rings.nan_fill(2, 12, float("nan"), used=14)
    assert np.isnan(rings.read(2, 14)[0][:, 12:]).all()
    assert not np.isnan(rings.read(2, 12)[0]).any()
