"""What a step being traced gives layers of its cache: a layer that contradicts what its family states is an error."""

from __future__ import annotations

import pytest
import torch

from llmc.compiler.frontend.attention import TraceState
from llmc.runtime.cache_shape import CacheShape, CacheTensor, key_value

SHAPE = CacheShape(2, (CacheTensor(0, "conv", "state", (3, 2)), *key_value(1, 2, 4, 6)))
LENGTHS = torch.ones(2, dtype=torch.long)


def state(cached: bool) -> TraceState:
    cache = [torch.full(t.size(2, 5), float(i)) for i, t in enumerate(SHAPE)] if cached else []
    return TraceState(LENGTHS[:, None], LENGTHS, LENGTHS, SHAPE, cache)


def test_a_layer_gets_its_own_tensors_and_the_length_is_that_of_keys() -> None:
    found = state(cached=True)
    past = found.past(1)
    assert past is not None and [tuple(t.shape) for t in past] == [(2, 2, 5, 4), (2, 2, 5, 6)]
    conv = found.state(0, "conv")
    assert conv is not None and tuple(conv.shape) == (2, 3, 2)
    assert found.capacity == 5


def test_a_program_without_a_cache_gives_nothing() -> None:
    found = state(cached=False)
    assert (found.past(1), found.state(0, "conv"), found.capacity) == (None, None, 0)


def test_outputs_are_in_the_order_of_the_cache_whatever_wrote_first() -> None:
    found = state(cached=True)
    key, value, conv = torch.ones(2, 2, 1, 4), torch.ones(2, 2, 1, 6), torch.ones(2, 3, 2)
    found.keep(1, 1, key, value)
    found.keep_state(0, "conv", conv)
    assert [id(t) for t in found.outputs()] == [id(conv), id(key), id(value)]


def test_a_cache_that_the_family_does_not_state_is_an_error() -> None:
    found = state(cached=True)
    with pytest.raises(ValueError, match="no state 'recurrent'"):
        found.state(0, "recurrent")
    with pytest.raises(ValueError, match="state conv of layer 0 is"):
        found.keep_state(0, "conv", torch.ones(2, 3, 3))
    found.keep(1, 1, torch.ones(2, 2, 1, 4), torch.ones(2, 2, 1, 6))
    with pytest.raises(ValueError, match=r"differ from the cache shape of the architecture: \[\(0, 'conv'\)"):
        found.outputs()
