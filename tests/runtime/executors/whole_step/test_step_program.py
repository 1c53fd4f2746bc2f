"""What a step of fixed shapes reads and writes, in numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket
from llmc.runtime.executors.whole_step.step_program import inputs
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
