"""A bucket's whole step as one graph of fixed shapes: read cache rows, run the program, write new tokens and states.

A portable program takes its rows' past and returns their new keys, values and states. On a CPU, the code around it
selects rows and keeps live tokens with shapes that change from step to step, and would be recompiled for each. Here it
is part of the graph, and only tensor values change:

    slots [B]           the slot that a row reads, and writes its states to; a dummy row's is the first row's
    sources [B·Q]       which new token, as row · Q + column, is written for each
    places [B·Q]        where, as slot · P + token slot, in arrays with P token slots per slot

All are int64. sources and places exist for each P (`lengths_of`, cache.py), because a ring buffer keeps only the last P
new tokens, with token p in token slot p mod P. A token that is not kept is replaced by the next kept token of its row,
or the last one; a dummy row's by the first that row 0 keeps. That token is then written twice with equal values, and
nothing else is written. Likewise a dummy row writes the first row's state: sources of column 0 say whose state a row
writes. vllm-gaudi also writes new tokens by index_copy_ over flat offsets (vllm_gaudi/extension/utils.py, VLLMKVCache),
and sends others to a block that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from llmc.runtime.executors.whole_step.cache import lengths_of

if TYPE_CHECKING:
    from llmc.runtime.executors.whole_step.cache import AcceleratorArray, AcceleratorCache
    from llmc.runtime.portable_program import PortableProgram
    from llmc.runtime.step import Step

Run: TypeAlias = Callable[..., Sequence[Any]]
"""A step's function. Its input and output tensors are on the accelerator."""


def flat_step(program: PortableProgram, context: int, arrays: Sequence[AcceleratorArray]) -> Run:
    """A program over any cache in such `arrays`. Arguments: `inputs`, the arrays, the weights, all on one device.

    It writes the live rows' new tokens and states into the arrays, and returns logits [B, V], and the top values and
    ids [B, K] if the program has them.
    """
    import torch

    lengths = lengths_of(arrays)
    first, entries = 2 * len(lengths), sum(len(array.members) for array in arrays)

    def step(token_ids: Any, past: Any, new: Any, slots: Any, *rest: Any) -> list[Any]:
        written = dict(zip(lengths, zip(rest[:first:2], rest[1:first:2], strict=True), strict=True))
        kept, weights = rest[first : first + len(arrays)], rest[first + len(arrays) :]
        held: dict[int, Any] = {}
        if program.cache_inputs:
            for array, tensor in zip(arrays, kept, strict=True):
                # tensor by tensor, so that a compiler reads each where its layer does, and copies no whole past
                for i, each in zip(array.members, tensor.unbind(0), strict=True):
                    if array.kind == "kv":
                        read = min(context, array.of_slot[0])
                        held[i] = each.narrow(1, 0, read).index_select(0, slots).transpose(1, 2)
                    else:
                        held[i] = each.index_select(0, slots)
        found = program.run(token_ids, past, new, *(held[i] for i in range(len(held))), *weights)
        built = found[-entries:]
        for array, tensor in zip(arrays, kept, strict=True):
            entry = torch.stack([built[i] for i in array.members])
            if array.kind == "kv":
                sources, offsets = written[array.of_slot[0]]
                flat = (len(array.members), -1, *tensor.shape[3:])
                tokens = entry.transpose(2, 3).reshape(flat).index_select(1, sources)
                tensor.view(flat).index_copy_(1, offsets, tokens)
            else:
                query = token_ids.shape[1]
                rows = rest[0].view(token_ids.shape).select(1, 0).div(query, rounding_mode="floor")
                tensor.index_copy_(1, slots, entry.index_select(1, rows).to(tensor.dtype))
        return list(found[:-entries])

    return step


def step_program(flat: Run, weights: Sequence[Any], cache: AcceleratorCache) -> Run:
    """A step over the current `cache`. A call with `inputs` returns `flat_step`'s outputs."""

    def step(*given: Any) -> list[Any]:
        return list(flat(*given, *cache.tensors, *weights))

    return step


def inputs(step: Step, lengths: Sequence[int]) -> list[Any]:
    """A step's arguments on the host, for arrays of such `lengths`; the step must have a live row."""
    import torch

    live, (batch, query) = len(step.slots), step.token_ids.shape
    slots = np.full(batch, step.slots[0], np.int64)
    slots[:live] = step.slots
    rows = np.where(np.arange(batch) < live, np.arange(batch), 0)[:, None]
    arrays = [step.token_ids, step.past_lengths, step.new_lengths, slots]
    for length in lengths:
        columns = np.clip(np.arange(query), step.new_lengths[:, None] - length, step.new_lengths[:, None] - 1)
        columns[live:] = columns[0, 0]
        offsets = slots[rows] * length + (step.past_lengths[rows] + columns) % length
        arrays += [(rows * query + columns).ravel(), offsets.ravel()]
    return [torch.from_numpy(np.array(array, np.int64)) for array in arrays]


def whole_graph(run: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`run`, a function, as one graph of fixed shapes, compiled by its first call with torch.compile's `options`.

    torch._dynamo stores compiled graphs with a function's code, at most 8 for each, and tries them in turn. Each graph
    therefore gets its own code object.
    """
    import torch

    assert isinstance(run, FunctionType)
    own = FunctionType(run.__code__.replace(), run.__globals__, run.__name__, run.__defaults__, run.__closure__)
    built: Callable[..., Any] = torch.compile(own, fullgraph=True, dynamic=False, **options)
    return built
