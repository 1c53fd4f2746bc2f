"""ONNX Runtime on CPU with llmc's own operators (onnxruntime/kernels): one executable for every shape of step.

A step's rows are packed, so nothing is padded, and prefill and decode share steps (`ragged`). Attention gets each row's
slot, past and tokens, and appends in place to the cache, [slots, kv_heads, capacity, head_dim] for each layer's keys
and values, in float16, bfloat16 or 8 bits (cache_formats.py), in ring buffers for layers with a window. A row with more
new tokens than a ring buffer can take beyond its window needs several steps. Recurrent states are replaced in place,
[slots, *shape] in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from llmc.runtime.executors.base import Capabilities
from llmc.runtime.executors.compatibility import kernels_here, require_version
from llmc.runtime.executors.onnxruntime.cache_formats import format_of, lines_of
from llmc.runtime.executors.onnxruntime.executables import LOGIT_ROWS, BoundSession, OnnxExecutor
from llmc.runtime.executors.slot_cache import SlotCache, Tensors
from llmc.runtime.host import KERNELS_PROMPT_CHUNK
from llmc.runtime.step import ADAPTERS, in_pieces

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.step import Step, StepPart

Array = NDArray[np.float32]
ROWS = "rows"
"""Graph input [N, 4] int64: each row's slot, cached tokens, first token in the step, and number of tokens."""


DECODING = "decoding"
"""Graph input [1] int64, if prefill and decode are computed differently: how many leading tokens decode."""


class KernelExecutor(OnnxExecutor):
    """Runs ragged steps with llmc's kernels."""

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """Reject a bundle compiled with another ONNX Runtime or for kernels that this CPU cannot run."""
        require_version(bundle, "onnxruntime", ort.__version__, "onnxruntime")
        kernels_here(bundle)

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        held = format_of(bundle)
        self.capabilities = Capabilities(
            exact=True, ragged=True, scores_each=True, prompt_chunk=KERNELS_PROMPT_CHUNK, cache_dtype=held.exact
        )
        self._cache = SlotCache(lines_of(bundle), slots, capacity, dtype=held.dtype, home_kind=held.tensors)
        self._staging = Tensors((), 0)
        self._session: BoundSession | None = None
        spare = bundle.cache_shape.rewind.spare
        self._most_new = None if spare is None else spare + 1
        """Largest number of new tokens per row in a step of the graph; None: any number."""

    def _require(self, step: Step) -> None:
        self._check_step(step, self._cache.held)

    def _parts(self, step: Step) -> Iterator[StepPart]:
        most = self._most_new
        if most is not None and int(step.new_lengths[: len(step.slots)].max()) > most:
            return in_pieces(step, most)
        return iter([(step, np.arange(len(step.slots)))])

    def _run_part(self, step: Step, each: bool) -> None:
        live = len(step.slots)
        new, ids = step.new_lengths[:live], step.token_ids[:live]
        if int(new.min()) != step.query:
            ids = ids[np.arange(step.query) < new[:, None]]
        ends = np.cumsum(new)
        rows = np.stack([np.array(step.slots, np.int64), step.past_lengths[:live], ends - new, new], axis=1)
        wanted = np.arange(ends[-1]) if each else ends - 1
        self._reserve(len(wanted))
        if self._session is None:
            session = self._executables.session(self._executables.executable(step))
            shape, cache = self.bundle.cache_shape, self._cache
            views = zip((*shape.kv, *shape.states), (*cache.home.rows(0, self.slots), *cache.states), strict=True)
            caches = {t.entry: (view, view) for t, view in views}
            self._session = BoundSession(session, caches)
        inputs = {
            "token_ids": ids.reshape(1, -1), ROWS: rows, LOGIT_ROWS: wanted, DECODING: np.array([step.decode_tokens]),
        }  # fmt: skip
        if self.bundle.adapters:
            inputs[ADAPTERS] = np.repeat(step.row_adapters[:live], new)[None]
        self._session.run(inputs, self._results)
        self._cache.end_at_home(step)

    def close(self) -> None:
        self._session = None
        super().close()
