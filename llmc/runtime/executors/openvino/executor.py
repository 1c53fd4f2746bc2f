"""OpenVINO with paged attention: one executable for every shape of step, and the cache in blocks.

A step's rows are packed, so nothing is padded, and prefill and decode share steps (`ragged`). Each slot has a block
table. Slots with a common prefix share blocks, which are copied when one of them writes. Layers with windows have their
own tables, and free blocks (paged_cache.py). Recurrent states have a row for each slot (states.py). If the model needs
rows of one length, rows of equal length run together, one length after another.

Executables of a fixed number of tokens, if the bundle has them, run the decode steps that they fit. A slightly smaller
step is padded with rows in a block that no slot owns.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.artifacts.bundle.manifest_schema import STARTER_NAME
from llmc.runtime.executors.base import EXECUTABLES, Capabilities, Executor, ExecutorDescription
from llmc.runtime.executors.compatibility import require_features, require_version
from llmc.runtime.executors.openvino.blocks import BLOCK
from llmc.runtime.executors.openvino.device import compilation_monitor, require_device, version
from llmc.runtime.executors.openvino.paged_cache import PagedCache, StepRows
from llmc.runtime.executors.openvino.paged_models import PagedModels
from llmc.runtime.top_logits import TopLogits, top_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmc.runtime.bundle import Bundle
    from llmc.runtime.cache_shape import Rewind
    from llmc.runtime.step import Step

Array = NDArray[np.float32]
MOST_FILLED = 0.25
"""The largest fraction of padding rows in a fixed step."""


class OpenVinoExecutor(Executor):
    """Runs ragged steps on OpenVINO's paged attention."""

    description: ClassVar[ExecutorDescription] = ExecutorDescription(
        {"weights": "data", EXECUTABLES: "data", STARTER_NAME: "code"}, opens_in_thread=True
    )

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        require_version(bundle, "openvino", version(), "OpenVINO")
        require_features(bundle, "CPU")
        require_device("CPU")

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        precision, space = str(bundle.manifest.options.get("kv_cache_dtype")), bundle.settings.openvino_kv_space
        self._cache = PagedCache(precision, bundle.cache_shape, slots, capacity, space)
        self.compilations.monitors.append(compilation_monitor())
        self.capabilities = Capabilities(
            exact=True, ragged=True, scores_each=True,
            cache_tokens=self._cache.tokens if self._cache.shared else None, block_tokens=BLOCK,
            cache_dtype="bf16" if precision == "bf16" else "f32",  # eight bits and their scales need a float32
        )  # fmt: skip
        self._models = PagedModels(bundle, self._cache, slots, threads, self.compilations)
        self._starter: Starter | None = None
        if STARTER_NAME in bundle.manifest.files:
            self._starter = Starter(bundle, slots, capacity, threads, self._models.open_any)
            self._starter.executor.compilations.part_of(self.compilations)
        else:
            self._models.open_any()
        self._top: TopLogits | None = None

    def executable_of(self, step: Step) -> str:
        fixed = self._fitting(step)
        shape = ("decode", fixed, 1, None) if fixed else ("any", None, None, None)
        return str(self.bundle.executable(*shape))

    def open_all(self) -> None:
        """Open the rest: the model behind a starter, and the executables of fixed sizes."""
        self._leave_starter()
        self._models.open_fixed()

    def run(self, step: Step) -> Array:
        self._run(step, each=False)
        return self.logits()

    def run_each(self, step: Step) -> Array:
        return self._run(step, each=True)

    def run_top(self, step: Step) -> TopLogits:
        """Run a step and return the top logits; the graph's TopK is stable, so ties are ordered by lower id."""
        k = self._require_top()
        self._run(step, each=False)
        if self._top is None:
            return top_of(self.logits(), k)
        return self._top

    def _run(self, step: Step, each: bool) -> Array:
        self._check_step(step, self._cache.held)
        live = len(step.slots)
        past, new = step.past_lengths[:live], step.new_lengths[:live]
        if self._starter is not None and self._starter.other_is_open:
            self._leave_starter()
        ends = (past + new).tolist()
        for slot, start, end in zip(step.slots, past.tolist(), ends, strict=True):
            self._cache.prepare(slot, start, end)
        if self._starter is not None:
            self._top = None
            logits = (self._starter.run_each if each else self._starter.run)(step)
            self._starter.open_other()
        else:
            logits = self._infer(step, new, each)
        for slot, end in zip(step.slots, ends, strict=True):
            self._cache.written(slot, end)
        self._keep(logits, each_of=step if each else None)
        if self._starter is None:
            self._models.open_fixed_behind()
        return logits

    def _infer(self, step: Step, new: NDArray[np.int64], each: bool) -> Array:
        fixed = self._fitting(step)
        together = [np.arange(len(new))]
        if self._models.request(fixed).one_length:
            together = [np.flatnonzero(new == length) for length in np.unique(new)]
        if len(together) == 1:
            logits, self._top = self._infer_rows(step, together[0], fixed, each)
            return logits
        built = []
        for rows in together:
            found, top = self._infer_rows(step, rows, fixed, each)
            built.append([found.copy(), *([] if top is None else [top.values.copy(), top.ids.copy()])])
        counts = new if each else np.ones_like(new)
        begins = np.cumsum(counts) - counts
        order = np.argsort([int(begins[row] + i) for rows in together for row in rows for i in range(counts[row])])
        logits, *most = (np.concatenate(parts)[order] for parts in zip(*built, strict=True))
        self._top = TopLogits(*most) if most else None
        return logits

    def _infer_rows(self, step: Step, at: NDArray[np.int64], fixed: int, each: bool) -> tuple[Array, TopLogits | None]:
        """Logits of some rows of a step, run together."""
        slots = [step.slots[row] for row in at]
        past, new = step.past_lengths[at], step.new_lengths[at]
        rows = StepRows.of(
            step.token_ids[at], past, new, slots, step.row_adapters[at], self._cache.rows(slots, past, new)
        )
        wanted = np.arange(len(rows.token_ids), dtype=np.int64) if each else rows.ends
        kept = len(wanted)
        if fixed:
            rows, wanted = self._models.filled(rows, fixed)
        logits, top = self._models.request(fixed).infer(rows, wanted, self.bundle.sample_top_k)
        return logits[:kept], None if top is None else TopLogits(top[0][:kept], top[1][:kept])

    def _fitting(self, step: Step) -> int:
        """Tokens of the fixed executable that runs a step; 0 for the one for every shape."""
        rows = len(step.slots)
        if step.phase != "decode" or not self._models.fixed or step.live_tokens != rows:
            return 0
        size = min((s for s in self._models.fixed if s >= rows), default=0)
        return size if size and size - rows <= MOST_FILLED * size else 0

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Share the blocks. Only states are copied before one of the two slots writes."""
        self._cache.held.require(source, length)
        if self._starter is not None:
            self._starter.executor.copy_prefix(source, target, length)
        elif self._models.states is not None:
            self._models.states.copy(source, target)
        self._cache.share(source, target, length)

    def export_prefix(self, slot: int, length: int) -> list[Array]:
        self._leave_starter()
        kv = iter(self._cache.read(slot, length))
        states = iter([] if self._models.states is None else self._models.states.read(slot))
        return [next(kv if t.kind == "kv" else states) for t in self.bundle.cache_shape]

    def import_prefix(self, slot: int, prefix: list[Array]) -> None:
        length = self._check_prefix(prefix, len(self.bundle.cache_shape))
        self._leave_starter()
        self._take(slot, length, prefix)

    def _take(self, slot: int, length: int, prefix: list[Array]) -> None:
        said = list(zip(self.bundle.cache_shape, prefix, strict=True))
        self._cache.write(slot, length, [tensor for t, tensor in said if t.kind == "kv"])
        if self._models.states is not None:
            self._models.states.write(slot, [tensor for t, tensor in said if t.kind == "state"])

    def _leave_starter(self) -> None:
        """Take over the starter's cached tokens, once the paged model is open."""
        if self._starter is not None:
            starter, self._starter = self._starter, None
            starter.hand_over(self._cache.held.used, self.bundle.cache_shape.rewind, self._take)
            for slot, used in enumerate(self._cache.held.used):
                self._cache.held.wrote(slot, 0, used)

    def nan_fill(self, slot: int, start: int, value: float) -> None:
        """Fill what the slot does not own of its last block, and every block taken from now on; at 0 also states."""
        self._leave_starter()
        self._cache.nan_fill(slot, start, value)
        if self._models.states is not None and start == 0:
            self._models.states.nan_fill(slot, value)

    def memory(self) -> dict[str, int]:
        """Bytes of used blocks and states, of the whole pool and all states, and the number of open executables."""
        states, cache = self._models.states, self._cache
        of_states = 0 if states is None else states.slot_bytes
        return {
            "cache": cache.held_bytes + sum(map(bool, cache.held.used)) * of_states,
            "cache_pool": cache.nbytes + self.slots * of_states,
            "open_executables": self._models.open_count,
        }

    def close(self) -> None:
        if self._starter is not None:
            self._starter.close()
        self._models.close()
        self._logits = self._top = None


class Starter:
    """Serves from executables that open at once, while OpenVINO prepares its own in a thread.

    OpenVINO takes half a second or more to open a paged model, because it packs the weights again. A bundle compiled
    with a starter holds, as `starter.json`, the manifest of a second bundle over the same blobs: the same model for a
    runtime that opens in a tenth of a second. Steps run there, row by row, until the paged model is open. Then the
    cached tokens of all slots are transferred, and the starter is closed.
    """

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int, open_other: Callable[[], None]) -> None:
        from llmc.runtime.executors import open_sized

        self._pool = ThreadPoolExecutor(1, thread_name_prefix="llmc-open")
        self.executor: Executor = open_sized(bundle.within(STARTER_NAME), slots, capacity, threads)
        self._open = open_other
        self._opened: Future[None] | None = None

    def open_other(self) -> None:
        """Start opening the other executor's models, if not yet started."""
        if self._opened is None:
            self._opened = self._pool.submit(self._open)

    @property
    def other_is_open(self) -> bool:
        """Whether `hand_over` would return without waiting."""
        return self._opened is not None and self._opened.done()

    def run(self, step: Step) -> NDArray[np.float32]:
        """Logits after the last token of each live row, [rows, V], one row after another."""
        return self._rows(step, self.executor.run)

    def run_each(self, step: Step) -> NDArray[np.float32]:
        """Logits after each live token."""
        return self._rows(step, self.executor.run_each)

    def _rows(self, step: Step, run: Callable[[Step], NDArray[np.float32]]) -> NDArray[np.float32]:
        built = []
        for row, slot in enumerate(step.slots):
            new, past = int(step.new_lengths[row]), int(step.past_lengths[row])
            one = replace(
                step, slots=(slot,), context=past, token_ids=step.token_ids[row : row + 1, :new],
                past_lengths=step.past_lengths[row : row + 1], new_lengths=step.new_lengths[row : row + 1],
                adapters=step.adapters[row : row + 1],
            )  # fmt: skip
            result = run(one)
            built.append(result[: new if run == self.executor.run_each else 1].copy())
        return np.concatenate(built)

    def hand_over(
        self, used: Sequence[int], rewind: Rewind, take: Callable[[int, int, list[NDArray[np.float32]]], None]
    ) -> None:
        """Wait until the other executor's models are open, and pass the tokens of every slot to `take`.

        Of ring buffers, it passes what any start that the other's `rewind` allows may see. Raises errors from opening
        them.
        """
        self.open_other()
        assert self._opened is not None
        self._opened.result()
        for slot, length in enumerate(list(used)):
            if length:
                take(slot, length, self._prefix(slot, length, rewind.floor(length)))
        self.close()

    def _prefix(self, slot: int, length: int, floor: int) -> list[NDArray[np.float32]]:
        """A slot's content; of ring buffers everything between the windows after `floor` tokens and after `length`."""
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
