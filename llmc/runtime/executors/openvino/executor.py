"""OpenVINO with paged attention: one executable for every shape of step, and the cache in blocks.

A step's rows are laid end to end, so that nothing is padded and prompts and decode share steps (`ragged`). Each slot
has a block table; slots that begin alike share blocks, which are copied when one of them writes (tables.py).
Executables of a fixed number of tokens, where the bundle has them, run the decode steps that they fit; a step of a few
rows less is filled up with rows of their own in a block that no slot holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.artifacts.bundle.manifest_schema import STARTER_NAME
from llmc.runtime.executors.base import EXECUTABLES, Content, RaggedExecutor
from llmc.runtime.executors.compatibility import require_features, require_version
from llmc.runtime.executors.openvino.blocks import BLOCK, BlockCache
from llmc.runtime.executors.openvino.device import compile_witness, require_device, version
from llmc.runtime.executors.openvino.paged_models import PagedModels
from llmc.runtime.executors.openvino.paged_request import StepRows
from llmc.runtime.executors.openvino.space import pool_blocks
from llmc.runtime.executors.openvino.starting import Starter
from llmc.runtime.executors.openvino.tables import BlockTables
from llmc.runtime.top_logits import TopLogits, top_of

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.witness import Witness
    from llmc.runtime.step import Step

Array = NDArray[np.float32]
MOST_FILLED = 0.25
"""The largest part of a fixed step that may be rows of no slot."""


class OpenVinoExecutor(RaggedExecutor):
    """See the module's docstring."""

    name: ClassVar[str] = "openvino"
    opens: ClassVar[Mapping[str, Content]] = {"weights": "data", EXECUTABLES: "data", STARTER_NAME: "code"}
    opens_in_thread: ClassVar[bool] = True

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """Refuse a bundle of another OpenVINO or instruction set, and a device that is not here."""
        require_version(bundle, "openvino", version(), "OpenVINO")
        require_features(bundle, "CPU")
        require_device("CPU")

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        uniform = bundle.uniform_cache(self.name)
        self._sizes = uniform.layers, uniform.kv_heads, uniform.head_dim
        precision = str(bundle.manifest.options.get("kv_cache_dtype"))
        space = bundle.settings.openvino_kv_space
        self._pool = pool_blocks(precision, self._sizes, slots, capacity, space)
        self._filler = self._pool.blocks
        self._cache = BlockCache(precision, *self._sizes, self._pool.blocks + 1)
        self._poisoned: float | None = None
        self._tables = BlockTables(slots, self._pool.blocks, self._cache.copy, self._poison_taken)
        self._models = PagedModels(bundle, self._cache, self._filler, threads, self.compilations)
        self._starter: Starter | None = None
        if STARTER_NAME in bundle.manifest.files:
            self._starter = Starter(bundle, slots, capacity, threads, self._models.open_any)
            self._starter.executor.compilations.part_of(self.compilations)
        else:
            self._models.open_any()
        self._top: TopLogits | None = None

    @property
    def cache_dtype(self) -> str:
        """The cache's precision; eight bits and their scales need a float32."""
        return "bf16" if self._cache.precision == "bf16" else "f32"

    @property
    def cache_tokens(self) -> int | None:
        """What the pool holds, where that is less than all slots may ask for."""
        return self._pool.blocks * BLOCK if self._pool.shared else None

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return BLOCK

    def executable_of(self, step: Step) -> str:
        """Name of the executable in the manifest."""
        fixed = self._fitting(step)
        shape = ("decode", fixed, 1, None) if fixed else ("any", None, None, None)
        return str(self.bundle.executable(*shape))

    def open_all(self) -> None:
        """Open what was not needed yet: the model behind a starter, and the executables of fixed sizes."""
        self._leave_starter()
        self._models.open_fixed()

    def witnesses(self) -> Sequence[Witness]:
        """And every model that OpenVINO compiles or imports."""
        return (*super().witnesses(), compile_witness())

    def run(self, step: Step) -> Array:
        """One step over the live tokens of the live rows."""
        self._run(step, each=False)
        return self.logits()

    def run_each(self, step: Step) -> Array:
        """The same graph, asked for the logits of every token."""
        return self._run(step, each=True)

    def run_top(self, step: Step) -> TopLogits:
        """As `run`; the graph's TopK is stable: of equal values the lower id comes first."""
        self._require_top()
        self._run(step, each=False)
        if self._top is None:
            return top_of(self.logits(), self.top_k)
        return self._top

    def _run(self, step: Step, each: bool) -> Array:
        self._check_step(step, self._tables.held)
        live = len(step.slots)
        past, new = step.past_lengths[:live], step.new_lengths[:live]
        if self._starter is not None and self._starter.other_is_open:
            self._leave_starter()
        ends = (past + new).tolist()
        for slot, start, end in zip(step.slots, past.tolist(), ends, strict=True):
            self._tables.prepare(slot, start, end)
        if self._starter is not None:
            self._top = None
            logits = (self._starter.run_each if each else self._starter.run)(step)
            self._starter.open_other()
        else:
            logits = self._infer(step, past, new, each)
        for slot, end in zip(step.slots, ends, strict=True):
            self._tables.written(slot, end)
        self._keep(logits, each_of=step if each else None)
        if self._starter is None:
            self._models.open_fixed_behind()
        return logits

    def _infer(self, step: Step, past: NDArray[np.int64], new: NDArray[np.int64], each: bool) -> Array:
        live = len(step.slots)
        rows = StepRows.of(step.token_ids[:live], past, new, [self._tables.tables[slot] for slot in step.slots])
        wanted = np.arange(len(rows.token_ids), dtype=np.int64) if each else rows.ends
        fixed = self._fitting(step)
        kept = len(wanted)
        if fixed:
            rows, wanted = rows.filled(fixed, self._filler)
        logits, top = self._models.request(fixed).infer(rows, wanted, self.top_k)
        self._top = None if top is None else TopLogits(top[0][:kept], top[1][:kept])
        return logits[:kept]

    def _fitting(self, step: Step) -> int:
        """Tokens of the fixed executable that runs a step; 0 for the one for every shape."""
        rows = len(step.slots)
        if step.phase != "decode" or not self._models.fixed or step.live_tokens != rows:
            return 0
        size = min((s for s in self._models.fixed if s >= rows), default=0)
        return size if size and size - rows <= MOST_FILLED * size else 0

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Share the blocks; nothing is copied before one of the two writes."""
        if self._starter is not None:
            self._starter.executor.copy_prefix(source, target, length)
        self._tables.share(source, target, length)

    def export_prefix(self, slot: int, length: int) -> list[Array]:
        """Copies out of the blocks, in float32."""
        self._leave_starter()
        self._tables.held.require(slot, length)
        return self._cache.read(self._tables.tables[slot], length)

    def import_prefix(self, slot: int, prefix: list[Array]) -> None:
        """Into blocks of the slot's own, rounded to the cache's precision."""
        self._check_prefix(prefix, 2 * self._sizes[0])
        self._leave_starter()
        self._take(slot, prefix)

    def _take(self, slot: int, prefix: list[Array]) -> None:
        length = prefix[0].shape[1]
        self._tables.prepare(slot, 0, length)
        self._cache.write(self._tables.tables[slot], prefix)
        self._tables.written(slot, length)

    def _leave_starter(self) -> None:
        """Take the cached tokens over from the starter, once the paged model is open."""
        if self._starter is not None:
            starter, self._starter = self._starter, None
            starter.hand_over(self._tables.held.used, self._take)

    def poison(self, slot: int, start: int, value: float) -> None:
        """Overwrite what the slot does not own of its last block, and every block that is taken from now on."""
        self._leave_starter()
        kept = min(start, self._tables.held.used[slot])
        self._tables.prepare(slot, kept, kept)
        if kept % BLOCK:  # prepare one more token, so that the slot owns its last block
            self._tables.prepare(slot, kept, kept + 1)
            self._cache.poison(self._tables.tables[slot], kept, value)
        self._cache.poison([self._filler], 0, value)
        self._poisoned = value

    def _poison_taken(self, block: int) -> None:
        if self._poisoned is not None:
            self._cache.poison([block], 0, self._poisoned)

    def memory(self) -> dict[str, int]:
        """Bytes of the blocks that are held, of the whole pool, and executables open."""
        held = self._pool.blocks - self._tables.free_blocks
        return {
            "cache": held * self._cache.block_bytes,
            "cache_pool": self._pool.blocks * self._cache.block_bytes,
            "open_executables": self._models.open_count,
        }

    def close(self) -> None:
        """Drop requests, models and the cache."""
        if self._starter is not None:
            self._starter.close()
        self._models.close()
        self._logits = self._top = None
