"""A bucket's whole step as one graph of fixed shapes: cache rows in, the program, new tokens and states into the cache.

A portable program takes its rows' past and returns their new keys, values and states. What is around it on a CPU,
choosing rows and keeping what is live, has shapes that change from step to step, and would be compiled again for each.
Here it is part of the graph, and what changes are numbers in tensors:

    slots [B]           the slot that a row reads, and writes its states to; a dummy row's is the first row's
    sources [B·Q]       which new token, as row · Q + column, is written for each
    places [B·Q]        where, as slot · capacity + position

All int64. A token that is not live stands for the last live one of its row, and a dummy row's for the first of row 0:
it is written twice, with the same value, and nothing else is written. So is the first row's state, in the place of a
dummy row's: sources of column 0 say whose state a row writes. vllm-gaudi keeps new tokens by index_copy_ over
flat places too (vllm_gaudi/extension/utils.py, VLLMKVCache), and sends others to a block that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from llmc.runtime.executors.whole_step.cache import CardCache
    from llmc.runtime.executors.whole_step.layout import CardArray
    from llmc.runtime.portable_program import PortableProgram
    from llmc.runtime.step import Step

Run: TypeAlias = Callable[..., Sequence[Any]]
"""A step's function; its tensors, in and out, are on the card."""


def flat_step(program: PortableProgram, context: int, arrays: Sequence[CardArray]) -> Run:
    """A program over any cache that lies in such `arrays`: `inputs`, the arrays, then the weights, all on one device.

    It writes the live rows' new tokens and states into the arrays, and returns logits [B, V], and the top values and
    ids [B, K] where the program has them.
    """
    import torch

    count, entries = len(arrays), sum(len(array.members) for array in arrays)

    def step(token_ids: Any, past: Any, new: Any, slots: Any, sources: Any, places: Any, *rest: Any) -> list[Any]:
        kept, weights = rest[:count], rest[count:]
        held: dict[int, Any] = {}
        if program.cache_inputs:
            for array, tensor in zip(arrays, kept, strict=True):
                # tensor by tensor, so that a compiler reads each where its layer does, and copies no whole past
                for i, each in zip(array.members, tensor.unbind(0), strict=True):
                    if array.kind == "kv":
                        held[i] = each.narrow(1, 0, context).index_select(0, slots).transpose(1, 2)
                    else:
                        held[i] = each.index_select(0, slots)
        found = program.run(token_ids, past, new, *(held[i] for i in range(len(held))), *weights)
        made = found[-entries:]
        for array, tensor in zip(arrays, kept, strict=True):
            entry = torch.stack([made[i] for i in array.members])
            if array.kind == "kv":
                each = (len(array.members), -1, *tensor.shape[3:])
                tokens = entry.transpose(2, 3).reshape(each).index_select(1, sources)
                tensor.view(each).index_copy_(1, places, tokens)
            else:
                rows = sources.view(token_ids.shape).select(1, 0).div(token_ids.shape[1], rounding_mode="floor")
                tensor.index_copy_(1, slots, entry.index_select(1, rows).to(tensor.dtype))
        return list(found[:-entries])

    return step


def step_program(flat: Run, weights: Sequence[Any], cache: CardCache) -> Run:
    """A step over the cache, as it is when it is called. A call with `inputs` gives what `flat_step` does."""

    def step(token_ids: Any, past: Any, new: Any, slots: Any, sources: Any, places: Any) -> list[Any]:
        return list(flat(token_ids, past, new, slots, sources, places, *cache.tensors, *weights))

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
