"""Serving from executables that open at once, while OpenVINO makes its own ready.

A paged model takes OpenVINO half a second or more to open, since it packs the weights again. A bundle compiled with a
starter holds, as `starter.json`, the manifest of a second bundle over the same blobs: the same model for a runtime that
opens in a tenth of a second. Steps run there, row by row, until the paged model is open; then the cached tokens of all
slots are handed over, and the starter is closed.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmc.artifacts.bundle.manifest_schema import STARTER_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmc.runtime.bundle import Bundle
    from llmc.runtime.cache_shape import Rewind
    from llmc.runtime.executors.base import Executor
    from llmc.runtime.step import Step


class Starter:
    """The quick executor, and the opening of the other in a thread of its own."""

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int, open_other: Callable[[], None]) -> None:
        from llmc.runtime.executors import open_sized

        self._pool = ThreadPoolExecutor(1, thread_name_prefix="llmc-open")
        self.executor: Executor = open_sized(bundle.within(STARTER_NAME), slots, capacity, threads)
        self._open = open_other
        self._opened: Future[None] | None = None

    def open_other(self) -> None:
        """Begin to open the other executor's models, if that has not begun."""
        if self._opened is None:
            self._opened = self._pool.submit(self._open)

    @property
    def other_is_open(self) -> bool:
        """Whether `hand_over` would not wait."""
        return self._opened is not None and self._opened.done()

    def run(self, step: Step) -> NDArray[np.float32]:
        """Logits after the last token of each live row, [rows, V], one row after the other."""
        return self._rows(step, self.executor.run)

    def run_each(self, step: Step) -> NDArray[np.float32]:
        """Logits after each live token."""
        return self._rows(step, self.executor.run_each)

    def _rows(self, step: Step, run: Callable[[Step], NDArray[np.float32]]) -> NDArray[np.float32]:
        made = []
        for row, slot in enumerate(step.slots):
            new, past = int(step.new_lengths[row]), int(step.past_lengths[row])
            one = replace(
                step, slots=(slot,), context=past, token_ids=step.token_ids[row : row + 1, :new],
                past_lengths=step.past_lengths[row : row + 1], new_lengths=step.new_lengths[row : row + 1],
                adapters=step.adapters[row : row + 1],
            )  # fmt: skip
            result = run(one)
            made.append(result[: new if run == self.executor.run_each else 1].copy())
        return np.concatenate(made)

    def hand_over(
        self, used: Sequence[int], rewind: Rewind, take: Callable[[int, int, list[NDArray[np.float32]]], None]
    ) -> None:
        """Wait until the other executor's models are open, and let `take` have the tokens of every slot: of rings what
        any start that the other's `rewind` allows may see.

        Raises what opening them raised.
        """
        self.open_other()
        assert self._opened is not None
        self._opened.result()
        for slot, length in enumerate(list(used)):
            if length:
                take(slot, length, self._prefix(slot, length, rewind.floor(length)))
        self.close()

    def _prefix(self, slot: int, length: int, floor: int) -> list[NDArray[np.float32]]:
        """What a slot has: of rings all between the windows after `floor` tokens and after `length`."""
        shape = self.executor.bundle.cache_shape
        whole, at = self.executor.export_prefix(slot, length), length
        while shape.rewind.rings and at > max(floor, 1):
            at = max(floor, 1, at - min(window for window, _ in shape.rewind.rings))
            for t, tensor, earlier in zip(shape, whole, self.executor.export_prefix(slot, at), strict=True):
                first = t.seen(at).start
                tensor[..., first:at, :] = earlier[..., first:, :]
        return whole

    def close(self) -> None:
        """Close the quick executor."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.executor.close()
