"""What a step of fixed shapes reads and writes, in numbers, and over a cache of tokens and states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket
from llmc.runtime.executors.whole_step.layout import CardArray
from llmc.runtime.executors.whole_step.step_program import flat_step, inputs
from llmc.runtime.step import Step, pad

CAPACITY = 16


@st.composite
def steps(draw: Any) -> Step:
    """A padded step with a live row at least, over 6 slots of CAPACITY tokens."""
    batch, query = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    slots = draw(st.lists(st.integers(0, 5), min_size=1, max_size=batch, unique=True))
    tokens = [draw(st.lists(st.integers(0, 99), min_size=1, max_size=query)) for _ in slots]
    past = [draw(st.integers(0, CAPACITY - query)) for _ in slots]
    return pad(Bucket("prompt", batch, query, CAPACITY - query), slots, tokens, past)


@given(steps())
def test_live_tokens_are_written_to_their_places_and_nothing_else_is(step: Step) -> None:
    token_ids, past, new, slots, sources, places = (tensor.numpy() for tensor in inputs(step, CAPACITY))
    assert slots.tolist()[: len(step.slots)] == list(step.slots)
    assert (sources.shape, places.shape) == ((step.batch * step.query,),) * 2
    written: dict[int, set[int]] = {}
    for source, place in zip(sources.tolist(), places.tolist(), strict=True):
        written.setdefault(place, set()).add(source)
    wanted = {
        slot * CAPACITY + int(past[row]) + column: {row * step.query + column}
        for row, slot in enumerate(step.slots)
        for column in range(int(new[row]))
    }
    assert written == wanted, "each live token once or more, with the same value every time"
    assert np.array_equal(token_ids, step.token_ids)


KEYS, STATES = CardArray("kv", "f32", (CAPACITY, 1, 1), (1,)), CardArray("state", "f32", (1,), (0,))


def summing(token_ids: Any, past: Any, new: Any, state: Any, keys: Any) -> tuple[Any, ...]:
    """Logits are the last of the past keys; a state sums first tokens, and starts at 0; a key is its token."""
    last = keys[:, 0].gather(1, (past[:, None, None] - 1).clamp(min=0))[:, 0]
    return last, torch.where(past[:, None] > 0, state, 0.0) + token_ids[:, :1], token_ids[:, None, :, None].float()


@given(steps())
def test_live_rows_states_and_tokens_are_read_and_replaced_and_no_others(step: Step) -> None:
    query, context = step.token_ids.shape[1], step.context
    program: Any = SimpleNamespace(run=summing, cache_inputs=2)
    keys, states = torch.arange(6.0 * CAPACITY).view(KEYS.size(6)) + 1000, torch.arange(6.0).view(STATES.size(6)) + 100
    wanted_keys, wanted = keys.clone(), states.clone()
    (logits,) = flat_step(program, context, [KEYS, STATES])(*inputs(step, CAPACITY), keys, states)
    for row, slot in enumerate(step.slots):
        past, new = int(step.past_lengths[row]), int(step.new_lengths[row])
        if past:
            assert logits[row, 0] == wanted_keys[0, slot, past - 1, 0, 0]
        wanted[0, slot] = step.token_ids[row, 0] + (wanted[0, slot] if past else 0)
        wanted_keys[0, slot, past : past + new, 0, 0] = torch.from_numpy(step.token_ids[row, :new].astype(np.float32))
    assert context == CAPACITY - query
    assert torch.equal(states, wanted)
    assert torch.equal(keys, wanted_keys)
