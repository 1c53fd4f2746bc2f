"""What executors over a SlotCache do alike: slots have homes, and pasts of prompts are laid out on a staging cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmc.runtime.executors.base import Executor

if TYPE_CHECKING:
    from llmc.runtime.executors.slot_cache import Array, SlotCache, Tensors
    from llmc.runtime.step import Step


class SlotCacheExecutor(Executor):
    """An executor whose constructor makes `_cache`, and `_staging` for prompt steps."""

    _cache: SlotCache
    _staging: Tensors

    def _stage(self, step: Step, length: int) -> Array:
        """The staging cache in rows of `length` tokens, which begin with what the live rows' slots hold."""
        self._staging.reserve(step.batch, length)
        staged = self._staging.array
        for row, slot in enumerate(step.slots):
            past = int(step.past_lengths[row])
            if past:
                staged[:, row, :, :past] = self._cache.read(slot, past)
        return staged

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy between the homes of two slots; decode lays the target out when it takes part."""
        self._cache.copy(source, target, length)

    def export_prefix(self, slot: int, length: int) -> list[Array]:
        """Copies out of the slot's home."""
        return list(self._cache.read(slot, length).astype(np.float32))

    def import_prefix(self, slot: int, prefix: list[Array]) -> None:
        """Copies into the slot's home."""
        self._check_prefix(prefix, len(self._cache.home.array))
        self._cache.write(slot, 0, np.stack(prefix))

    def poison(self, slot: int, start: int, value: float) -> None:
        """Overwrite what no live token owns, there and wherever live tokens are laid out."""
        self._cache.poison(slot, start, value)
        self._staging.poison(value)
