"""OpenVINO with paged attention: one executable for every shape of step, and the cache in blocks.

A step's rows are laid end to end, so that nothing is padded and prompts and decode share steps (`ragged`). Each slot
has a block table; slots that begin alike share blocks, which are copied when one of them writes (tables.py). Executables
of a fixed number of tokens, where the bundle has them, run the decode steps that they fit; a step of a few rows less is
filled up with rows of their own in a block that no slot holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmc.errors import ArtifactError, DeviceError, InputError
from llmc.runtime.compilations import COMPILATIONS
from llmc.runtime.executors.base import Executor
from llmc.runtime.host import cpu_features
from llmc.runtime.openvino.blocks import BLOCK, BlockCache
from llmc.runtime.openvino.device import MappedWeights, open_core, read_paged, require_device, version
from llmc.runtime.openvino.paged_request import PagedRequest, StepRows
from llmc.runtime.openvino.space import pool_blocks
from llmc.runtime.openvino.tables import BlockTables
from llmc.runtime.sampling.top import TopLogits
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.manifest_schema import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.step import Step

Array = NDArray[np.float32]
MOST_FILLED = 0.25
"""The largest part of a fixed step that may be rows of no slot."""


class OpenVinoExecutor(Executor):
    """See the module's docstring."""

    name: ClassVar[str] = "openvino"
    opens_in_thread: ClassVar[bool] = True

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """Refuse a bundle of another OpenVINO or instruction set, and a device that is not here."""
        made_with, here = bundle.manifest.toolchain.get("openvino"), version()
        if made_with != here:
            raise ArtifactError(
                f"{bundle.path}: compiled with OpenVINO {made_with}, this host has {here}; install "
                f"openvino=={made_with}, or compile again: {bundle.recompile_hint}"
            )
        wanted, host = set(bundle.manifest.isa), set(cpu_features())
        if wanted != host:
            differs = [f"without {f}" for f in sorted(wanted - host)] + [f"with {f}" for f in sorted(host - wanted)]
            raise ArtifactError(
                f"{bundle.path}: compiled for another CPU; this host is {', '.join(differs)}. "
                f"Compile again here: {bundle.recompile_hint}"
            )
        require_device("CPU")

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        model = bundle.manifest.model
        self._sizes = int(model["layers"]), int(model["kv_heads"]), int(model["head_dim"])
        self._vocabulary = int(model["vocab_size"])
        precision = str(bundle.manifest.options["kv_cache_dtype"])
        space = Settings.from_environment().openvino_kv_space
        self._pool = pool_blocks(precision, self._sizes, slots, capacity, space)
        self._cache = BlockCache(precision, *self._sizes, self._pool.blocks + 1)
        self._filler = self._pool.blocks
        self._tables = BlockTables(slots, self._pool.blocks, self._cache.copy, self._poison_taken)
        self._poisoned: float | None = None
        self._weights = MappedWeights(bundle.files.path("weights"))
        self._any = self._open(bundle.executable("any", None, None, None))
        self._fixed: dict[int, PagedRequest] = {}
        self._unopened = sorted(
            (e for e in bundle.manifest.executables if e.phase == "decode"), key=lambda e: e.batch or 0
        )
        self._logits: Array | None = None
        self._top: TopLogits | None = None

    @property
    def exact(self) -> bool:
        """Any shape runs as it is."""
        return True

    @property
    def ragged(self) -> bool:
        """Rows are laid end to end."""
        return True

    @property
    def scores_each(self) -> bool:
        """Logits of any token can be asked for."""
        return True

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
        return str(
            self.bundle.executable("decode", fixed, 1, None)
            if fixed
            else self.bundle.executable("any", None, None, None)
        )

    def open_all(self) -> None:
        """Open the executables of fixed sizes, too."""
        for executable in self._unopened:
            assert executable.batch is not None
            self._fixed[executable.batch] = self._open(executable)
        self._unopened = []
        self._weights.drop_pages()

    def run(self, step: Step) -> Array:
        """One step over the live tokens of the live rows."""
        rows = self._rows(step)
        self._infer(step, rows, rows.ends)
        return self.logits()

    def run_each(self, step: Step) -> Array:
        """The same graph, asked for the logits of every token."""
        rows = self._rows(step)
        self._infer(step, rows, np.arange(len(rows.token_ids), dtype=np.int64))
        return self.logits()

    def run_top(self, step: Step) -> TopLogits:
        """As `run`; the graph's TopK is stable: of equal values the lower id comes first."""
        self._require_top()
        rows = self._rows(step)
        self._infer(step, rows, rows.ends)
        assert self._top is not None
        return self._top

    def logits(self) -> Array:
        """The last step's, in OpenVINO's own memory."""
        if self._logits is None:
            raise InputError("no step has run yet, so there are no logits")
        return self._logits

    def _rows(self, step: Step) -> StepRows:
        self._check_step(step)
        for row, slot in enumerate(step.slots):
            self._tables.require_held(slot, int(step.past_lengths[row]))
        live = len(step.slots)
        past, new = step.past_lengths[:live], step.new_lengths[:live]
        for row, slot in enumerate(step.slots):
            self._tables.prepare(slot, int(past[row]), int(past[row] + new[row]))
        tables = [self._tables.tables[slot] for slot in step.slots]
        return StepRows.of(step.token_ids[:live], past, new, tables)

    def _infer(self, step: Step, rows: StepRows, wanted: NDArray[np.int64]) -> None:
        live = len(wanted)
        fixed = self._fitting(step)
        if fixed and live == len(step.slots):
            request = self._fixed[fixed]
            rows, wanted = rows.filled(fixed, self._filler)
        else:
            request = self._any
        logits, top = request.infer(rows, wanted, self.top_k)
        self._logits = logits[:live]
        self._top = None if top is None else TopLogits(top[0][:live], top[1][:live])
        for row, slot in enumerate(step.slots):
            self._tables.written(slot, int(step.past_lengths[row] + step.new_lengths[row]))

    def _fitting(self, step: Step) -> int:
        """Tokens of the fixed executable that runs a step; 0 for none."""
        rows = len(step.slots)
        if step.phase != "decode" or not self._fixed or step.live_tokens != rows:
            return 0
        size = min((s for s in self._fixed if s >= rows), default=0)
        return size if size and size - rows <= MOST_FILLED * size else 0

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Share the blocks; nothing is copied before one of the two writes."""
        self._tables.share(source, target, length)

    def export_prefix(self, slot: int, length: int) -> list[Array]:
        """Copies out of the blocks, in float32."""
        self._tables.require_held(slot, length)
        return self._cache.read(self._tables.tables[slot], length)

    def import_prefix(self, slot: int, prefix: list[Array]) -> None:
        """Into blocks of the slot's own, rounded to the cache's precision."""
        length, tensors = prefix[0].shape[1], 2 * self._sizes[0]
        if len(prefix) != tensors or length > self.capacity:
            raise InputError(f"{len(prefix)} tensors of {length} tokens do not fit {tensors} of {self.capacity} tokens")
        self._tables.prepare(slot, 0, length)
        self._cache.write(self._tables.tables[slot], prefix)
        self._tables.written(slot, length)

    def poison(self, slot: int, start: int, value: float) -> None:
        """Overwrite what the slot does not own of its last block, and every block that is taken from now on."""
        kept = min(start, self._tables.used[slot])
        self._tables.prepare(slot, kept, kept)
        if kept % BLOCK:  # as for a token more, so that the last block is the slot's own
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
            "open_executables": 1 + len(self._fixed),
        }

    def close(self) -> None:
        """Drop requests, models and the cache."""
        self._fixed.clear()
        self._logits = self._top = None
        del self._any

    def _open(self, executable: Executable) -> PagedRequest:
        """OpenVINO makes its primitives and packs weights now: a compilation of the toolchain, at open."""
        source = f"{self.bundle.path}: {executable}"
        model = read_paged(self.bundle.files.read(executable.blob), self._weights, *self._sizes[1:], source)
        properties = dict(self.bundle.manifest.options["properties"])
        try:
            compiled = open_core().compile_model(model, "CPU", {**properties, "INFERENCE_NUM_THREADS": self.threads})
        except RuntimeError as e:
            raise DeviceError(f"{source}: OpenVINO cannot open it: {str(e).splitlines()[-1]}") from e
        COMPILATIONS.opened(str(executable))
        return PagedRequest(compiled, self._cache)


def _tensor(array: NDArray[Any]) -> ov.Tensor:
    return ov.Tensor(array, shared_memory=True)
