"""A bucket's whole step as one graph of fixed shapes: cache rows in, the program, new tokens into the cache.

A portable program takes its rows' past and returns their new keys and values. What is around it on a CPU, choosing rows
and keeping live tokens, has shapes that change from step to step, and would be compiled again for each. Here it is part
of the graph, and what changes are numbers in tensors:

    slots [B]           the slot that a row reads; a dummy row reads the first row's
    sources [B·Q]       which new token, as row · Q + column, is written for each
    places [B·Q]        where, as slot · capacity + position

All int64. A token that is not live stands for the last live one of its row, and a dummy row's for the first of row 0:
it is written twice, with the same value, and nothing else is written. vllm-gaudi keeps new tokens by index_copy_ over
flat places too (vllm_gaudi/extension/utils.py, VLLMKVCache), and sends others to a block that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from llmc.runtime.executors.whole_step.cache import CardCache
    from llmc.runtime.portable_program import PortableProgram
    from llmc.runtime.step import Step

Run: TypeAlias = Callable[..., Sequence[Any]]
"""A step's function; its tensors, in and out, are on the card."""


def flat_step(program: PortableProgram, context: int) -> Run:
    """A program over any cache: `inputs`, the cache's tensor, then the weights, all on one device.

    It writes the new tokens into the cache's tensor, [2 · layers, slots, capacity, kv_heads, head_dim], and returns
    logits [B, V], and the top values and ids [B, K] where the program has them.
    """
    import torch

    def step(
        token_ids: Any, past: Any, new: Any, slots: Any, sources: Any, places: Any, kept: Any, *weights: Any
    ) -> list[Any]:
        tensors, rows, capacity, heads, head_dim = kept.shape
        held: tuple[Any, ...] = ()
        if context:
            # tensor by tensor, so that a compiler reads each where its layer does, and copies no whole past
            held = tuple(t.narrow(1, 0, context).index_select(0, slots).transpose(1, 2) for t in kept.unbind(0))
        found = program.run(token_ids, past, new, *held, *weights)
        made = torch.stack(found[-tensors:]).transpose(2, 3)
        made = made.reshape(tensors, -1, heads, head_dim).index_select(1, sources)
        kept.view(tensors, rows * capacity, heads, head_dim).index_copy_(1, places, made)
        return list(found[:-tensors])

    return step


def step_program(flat: Run, weights: Sequence[Any], cache: CardCache) -> Run:
    """A step over the cache, as it is when it is called. A call with `inputs` gives what `flat_step` does."""

    def step(token_ids: Any, past: Any, new: Any, slots: Any, sources: Any, places: Any) -> list[Any]:
        return list(flat(token_ids, past, new, slots, sources, places, cache.tensor, *weights))

    return step


def inputs(step: Step, capacity: int) -> list[Any]:
    """What a step is called with, on the host; the step has a live row."""
    import torch

    live, (batch, query) = len(step.slots), step.token_ids.shape
    slots = np.full(batch, step.slots[0], np.int64)
    slots[:live] = step.slots
    rows = np.where(np.arange(batch) < live, np.arange(batch), 0)[:, None]
    columns = np.minimum(np.arange(query), step.new_lengths[:, None] - 1)
    columns[live:] = 0
    places = slots[rows] * capacity + step.past_lengths[rows] + columns
    arrays = (
        step.token_ids, step.past_lengths, step.new_lengths, slots, (rows * query + columns).ravel(), places.ravel(),
    )  # fmt: skip
    return [torch.from_numpy(np.array(array, np.int64)) for array in arrays]
