"""Key and value caches for models of one shape, which read a cache of exactly their context and write none.

The host writes what is new to its place after each step. A decode step reads the slots as they are laid out for its
context, rows end to end; while steps keep to one context and one set of slots, nothing but their new tokens is copied.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from llmc.runtime.executors.slot_cache import Array, SlotCache, Tensors

if TYPE_CHECKING:
    from llmc.runtime.step import Step


class ContextCache(SlotCache):
    """The cached tokens of `slots` sequences; a decode layout is as long as the step's context."""

    def begin_decode(self, step: Step) -> Tensors:
        """The decode cache laid out for a decode step, its live rows loaded; dummy rows cover nothing of value."""
        return super().begin_decode(replace(step, context=step.context - 1))

    def append(self, step: Step, new: Array) -> None:
        """Keep the live rows' live tokens of `new` [tensors, batch, heads, query, head_dim], and nothing else."""
        if step.phase != "decode":
            for row, slot in enumerate(step.slots):
                self.write(slot, int(step.past_lengths[row]), new[:, row, :, : int(step.new_lengths[row])])
            return
        past = step.past_lengths[: len(step.slots)]
        within = np.flatnonzero(past < self.decode.length)
        self.decode.array[:, within, :, past[within]] = new[:, within][:, :, :, 0].swapaxes(0, 1)
        for slot in step.slots:
            start = int(past[slot])
            if start < self.decode.length:
                self._at_home[slot] = min(self._at_home[slot], start)
                self._in_decode[slot] = self.used[slot] = start + 1
            else:
                self.write(slot, start, new[:, slot])
