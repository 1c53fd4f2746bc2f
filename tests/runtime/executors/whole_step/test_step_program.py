"""What a step of fixed shapes reads and writes, in numbers, and over a cache of tokens, a ring of them, and states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket
from llmc.runtime.executors.whole_step.step import AcceleratorArray, flat_step, inputs, lengths_of
from llmc.runtime.step import Step, pad

CAPACITY, RING, SLOTS = 16, 3, 6


@st.composite
def steps(draw: Any) -> Step:
    """A padded step with a live row at least, over SLOTS slots of CAPACITY tokens."""
    batch, query = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    slots = draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=batch, unique=True))
    tokens = [draw(st.lists(st.integers(0, 99), min_size=1, max_size=query)) for _ in slots]
    past = [draw(st.integers(0, CAPACITY - query)) for _ in slots]
    return pad(Bucket("prompt", batch, query, CAPACITY - query), slots, tokens, past)


@given(steps())
def test_live_tokens_are_written_to_their_token_slots_and_nothing_else_is(step: Step) -> None:
    token_ids, past, new, slots, *pairs = (tensor.numpy() for tensor in inputs(step, (CAPACITY, RING)))
    assert slots.tolist()[: len(step.slots)] == list(step.slots)
    assert np.array_equal(token_ids, step.token_ids)
    for length, sources, offsets in zip((CAPACITY, RING), pairs[::2], pairs[1::2], strict=True):
        assert (sources.shape, offsets.shape) == ((step.batch * step.query,),) * 2
        written: dict[int, set[int]] = {}
        for source, index in zip(sources.tolist(), offsets.tolist(), strict=True):
            written.setdefault(index, set()).add(source)
        wanted = {
            slot * length + (int(past[row]) + column) % length: {row * step.query + column}
            for row, slot in enumerate(step.slots)
            for column in range(max(0, int(new[row]) - length), int(new[row]))
        }
        assert written == wanted, "each token that is kept once or more, with the same value every time"


ARRAYS = (
    AcceleratorArray("state", "f32", (1,), (0,)), AcceleratorArray("kv", "f32", (RING, 1, 1), (1,)),
    AcceleratorArray("kv", "f32", (CAPACITY, 1, 1), (2,)),
)  # fmt: skip


def summing(token_ids: Any, past: Any, new: Any, state: Any, *keys: Any) -> tuple[Any, ...]:
    """Logits are the last of the past keys, of the ring's and of all; a state sums first tokens, and starts at 0; a key
    is its token."""
    last = [k[:, 0].gather(1, ((past - 1).clamp(min=0) % k.shape[2])[:, None, None])[:, 0] for k in keys]
    built = token_ids[:, None, :, None].float()
    return torch.cat(last, 1), torch.where(past[:, None] > 0, state, 0.0) + token_ids[:, :1], built, built


def filled(slots: int) -> list[torch.Tensor]:
    """Arrays of a cache of different numbers."""
    sizes = [array.size(slots) for array in ARRAYS]
    return [torch.arange(1000.0 * i, 1000.0 * i + np.prod(size)).view(size) for i, size in enumerate(sizes, 1)]


@given(steps())
def test_live_rows_states_and_tokens_are_read_and_replaced_and_no_others(step: Step) -> None:
    program: Any = SimpleNamespace(run=summing, cache_inputs=3)
    kept, (states, *keys) = filled(SLOTS), filled(SLOTS)
    (logits,) = flat_step(program, step.context, ARRAYS)(*inputs(step, lengths_of(ARRAYS)), *kept)
    for row, slot in enumerate(step.slots):
        past, new = int(step.past_lengths[row]), int(step.new_lengths[row])
        states[0, slot] = step.token_ids[row, 0] + (states[0, slot] if past else 0)
        for i, each in enumerate(keys):
            held = each[0, slot, :, 0, 0]
            if past:
                assert logits[row, i] == held[(past - 1) % len(held)]
            for column in range(new):
                held[(past + column) % len(held)] = float(step.token_ids[row, column])
    assert all(map(torch.equal, kept, (states, *keys)))
