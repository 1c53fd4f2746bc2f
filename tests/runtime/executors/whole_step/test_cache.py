"""A cache of keys, values and states as arrays on an accelerator."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from llmc.runtime.cache_shape import CacheShape, CacheTensor, key_value
from llmc.runtime.executors.whole_step.step import AcceleratorArray, AcceleratorCache, arrays_of

HOST: Any = SimpleNamespace(device="cpu", put=lambda tensor: tensor, guarded=nullcontext, mark_step=lambda: None)
"""A accelerator that is this host."""
STATES = CacheTensor(0, "conv", "state", (3, 2)), CacheTensor(0, "recurrent", "state", (2, 2, 2), dtype="f32")
MIXED = CacheShape(3, (*STATES, *key_value(1, 2, 4), *key_value(2, 1, 4, 3)))
RINGS = CacheShape(2, (*key_value(0, 2, 4, window=2), *key_value(1, 2, 4))).in_rings(1, longest=100)
CAPACITY = 5


def filled(slots: int = 3, shape: CacheShape = MIXED) -> AcceleratorCache:
    """A cache of different numbers, which bfloat16 holds."""
    import torch

    cache = AcceleratorCache(HOST, shape, CAPACITY, "bf16")
    cache.make(slots)
    with torch.inference_mode():
        for tensor in cache.tensors:
            tensor.copy_(torch.arange(tensor.numel()).remainder(251).view(tensor.shape))
    return cache


def test_tensors_of_one_size_lie_in_one_array() -> None:
    only = AcceleratorArray("kv", "bf16", (5, 3, 8), (0, 1, 2, 3))
    assert arrays_of(CacheShape.plain(2, 3, 8), CAPACITY, "bf16") == (only,)
    assert [str(array) for array in arrays_of(MIXED, CAPACITY, "bf16")] == [
        "state bf16 [1, slots, 3, 2]", "state f32 [1, slots, 2, 2, 2]", "kv bf16 [2, slots, 5, 2, 4]",
        "kv bf16 [1, slots, 5, 1, 4]", "kv bf16 [1, slots, 5, 1, 3]",
    ]  # fmt: skip
    assert [AcceleratorArray.from_json(array.to_json()) for array in arrays_of(MIXED, CAPACITY, "f32")] == [
        *arrays_of(MIXED, CAPACITY, "f32")
    ]


def test_a_slot_takes_what_its_tokens_and_states_take() -> None:
    cache = filled()
    assert cache.slot_bytes == MIXED.nbytes(CAPACITY, "bf16")
    assert cache.nbytes == 3 * cache.slot_bytes


def test_a_slot_is_read_in_the_order_of_the_caches_shape() -> None:
    cache = filled()
    found = cache.read(1, 2)
    assert [tensor.shape for tensor in found] == [t.size(1, 2)[1:] for t in MIXED]
    kv = cache.tensors[2]
    assert (found[2] == kv[0, 1, :2].transpose(0, 1).float().numpy()).all()
    assert (found[3] == kv[1, 1, :2].transpose(0, 1).float().numpy()).all()
    found[0][:] = -1
    assert (cache.read(1, 2)[0] >= 0).all(), "copies"


def test_a_copy_takes_states_along_and_leaves_other_slots() -> None:
    cache = filled()
    before = [cache.read(slot, CAPACITY) for slot in range(3)]
    cache.copy(2, 0)
    for slot, wanted in enumerate((before[2], before[1], before[2])):
        assert all(map(np.array_equal, cache.read(slot, CAPACITY), wanted))


def test_what_was_read_is_written_with_zeros_behind_it() -> None:
    cache = filled()
    others = cache.read(0, CAPACITY), cache.read(2, CAPACITY)
    prefix = cache.read(2, 3)
    cache.write(1, 3, prefix)
    assert all(map(np.array_equal, cache.read(1, 3), prefix))
    assert not any(tensor[:, 3:].any() for tensor in cache.read(1, CAPACITY)[2:])
    assert all(map(np.array_equal, (*cache.read(0, CAPACITY), *cache.read(2, CAPACITY)), (*others[0], *others[1])))


@pytest.mark.parametrize("start", [0, 2])
def test_states_are_nan_filled_where_no_token_is_left(start: int) -> None:
    cache = filled()
    others = cache.read(0, CAPACITY)
    cache.nan_fill(1, start, float("nan"))
    conv, recurrent, *kv = cache.read(1, CAPACITY)
    assert np.isnan(conv).all() == np.isnan(recurrent).all() == (start == 0)
    for tensor in kv:
        assert np.isnan(tensor[:, start:]).all() and not np.isnan(tensor[:, :start]).any()
    assert all(map(np.array_equal, cache.read(0, CAPACITY), others))


def test_a_cache_that_does_not_fit_leaves_the_one_that_is_there() -> None:
    cache = filled()
    before = cache.tensors
    full = SimpleNamespace(**{**vars(HOST), "device": "nowhere"})
    cache._accelerator = cast(Any, full)
    with pytest.raises(RuntimeError):
        cache.make(9)
    assert cache.tensors is before


def test_a_ring_has_its_own_token_slots_and_gives_the_window_alone() -> None:
    """Of 5 tokens the last one that a later token may see, token 4, lies at place 1 of 3."""
    cache = filled(shape=RINGS)
    assert [str(array) for array in cache.arrays] == ["kv bf16 [2, slots, 3, 2, 4]", "kv bf16 [2, slots, 5, 2, 4]"]
    assert cache.lengths == (3, 5)
    key, _, *others = cache.read(1, 5)
    assert not key[:, :4].any()
    assert (key[:, 4] == cache.tensors[0][0, 1, 1].float().numpy()).all()
    assert all(tensor.any(axis=(0, 2)).all() for tensor in others)
    before = cache.read(2, 5)
    cache.write(0, 5, cache.read(1, 5))
    assert all(map(np.array_equal, cache.read(0, 5), cache.read(1, 5)))
    assert all(map(np.array_equal, cache.read(2, 5), before))


def test_nan_fill_leaves_the_token_slots_of_earlier_tokens() -> None:
    """Of 5 tokens the last is taken back, which lies at place 1 of 3."""
    cache = filled(shape=RINGS)
    cache.nan_fill(1, 4, float("nan"), used=5)
    ring, whole = (tensor[0, 1, :, 0, 0].isnan().tolist() for tensor in cache.tensors)
    assert ring == [False, True, False]
    assert whole == [False] * 4 + [True]
