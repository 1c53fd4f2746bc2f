"""ONNX Runtime on CPU. GroupQueryAttention updates the cache in place through IOBinding, without allocations per step.

Graphs take the tokens whose logits are returned as an input: each row's last live one, or every one (`run_each`).

There are two kinds of bundle. With one executable for all buckets (`static_dims` empty), a step runs at its exact shape
on the cache [slots, kv_heads, capacity, head_dim]. Specialised, each bucket has its own executable with fixed batch,
query and cache length context + query. Decode then runs on a cache of the bucket's length, in which slots are laid out
while they decode (slot_cache.py); a prompt runs on a staging cache and is copied into its slots. Ring buffers are
contiguous ones (`RollingTensors`). Recurrent states are read from their slots (specialised: from a copy), written
separately, and then copied into the slots of live rows.

With llmc's own operators (onnxruntime/kernels), one executable runs every shape of step. A step's rows are packed, so
nothing is padded, and prefill and decode share steps (`ragged`). Attention gets each row's slot, past and tokens, and
appends in place to the cache, [slots, kv_heads, capacity, head_dim] for each layer's keys and values, in float16,
bfloat16 or 8 bits, in ring buffers for layers with a window. A row with more new tokens than a ring buffer can take
beyond its window needs several steps. Recurrent states are replaced in place, [slots, *shape] in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from llmc.errors import InputError
from llmc.runtime.executors.base import Capabilities
from llmc.runtime.executors.compatibility import kernels_here, require_features, require_version
from llmc.runtime.executors.onnxruntime.executables import LOGIT_ROWS, BoundSession, OnnxExecutor, format_of, lines_of
from llmc.runtime.executors.slot_cache import SlotCache, TensorPart, Tensors, parts_of
from llmc.runtime.host import KERNELS_PROMPT_CHUNK, PROMPT_CHUNK, ROLLING_ROOM, rolling_ring
from llmc.runtime.step import ADAPTERS, in_pieces, rows_apart

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


_MAX_BINDINGS = 64

STARTS = "first_token_"
"""Input prefix before a window's size: the token at which each row's caches of that window begin, [B] int64."""


class OnnxRuntimeExecutor(OnnxExecutor):
    """Runs ONNX graphs with ONNX Runtime's own operators."""

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        require_version(bundle, "onnxruntime", ort.__version__, "onnxruntime")
        require_features(bundle, "instruction set")

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        buckets = bundle.plan.buckets
        shape = bundle.cache_shape
        # one executable for every shape; one of fixed shape returns as many logits as it has rows
        self._exact = exact = not bundle.manifest.options.get("static_dims")
        self.capabilities = Capabilities(exact, scores_each=exact, prompt_chunk=PROMPT_CHUNK)
        static = () if exact else buckets
        decode = [(b.batch, b.context + 1) for b in static if b.phase == "decode"] or [(0, 0)]
        prompt = [(1 if b.context else b.batch) * (b.context + b.query) for b in static if b.phase == "prompt"]
        rows, longest = (max(values) for values in zip(*decode, strict=True))
        if self._exact:
            self._cache = SlotCache(shape, slots, capacity, home_kind=RollingTensors)
        else:
            self._cache = SlotCache(shape, slots, capacity, rows, longest, decode_kind=RollingTensors)
        self._windows = [window for window, _ in shape.rewind.rings]
        self._staging = RollingTensors(parts_of(shape), max(prompt, default=0))
        most = max(slots, *(b.batch for b in buckets))
        self._reserve(most)
        self._given_states, self._new_states = (
            [np.zeros(t.size(count, 0), np.float32) for t in shape.states]
            for count in (0 if self._exact else most, most)
        )
        self._bound: dict[tuple[Any, ...], BoundSession] = {}

    def _require(self, step: Step) -> None:
        self._check_step(step, self._cache.held, first_slots=not self._exact)

    def _parts(self, step: Step) -> Iterator[StepPart]:
        """Split a multi-row prefill over a past by rows, as the operator requires, and rows too long for rings."""
        past = step.past_lengths.any() if self._exact else step.context
        long = self._exact and bool(self._windows) and step.query > ROLLING_ROOM
        rows: Iterator[StepPart] = iter([(step, np.arange(len(step.slots)))])
        if (step.phase == "prompt" or step.query > 1) and step.batch > 1 and (past or long):
            rows = rows_apart(step)
        for part, those in rows:
            if long:
                yield from ((piece, those[own]) for piece, own in in_pieces(part, ROLLING_ROOM))
            else:
                yield part, those

    def _run_part(self, step: Step, each: bool) -> None:
        self._reserve(step.live_tokens if each else step.batch)
        if self._exact:
            first = step.slots[0]
            if step.slots != tuple(range(first, first + step.batch)):
                raise InputError(f"slots {step.slots} are not consecutive")
            for row, slot in enumerate(step.slots):
                past = int(step.past_lengths[row])
                self._cache.home.make_room(slot, past, past + step.query)
            self._replay(step, self._cache.home, first, each)
            self._cache.end_at_home(step)
        elif step.phase == "decode":
            self._replay(step, self._cache.begin_decode(step), 0, each)
            self._cache.end_decode(step)
        else:
            self._prompt_on_staging(step)
        self._executables.open_rest()

    def _prompt_on_staging(self, step: Step) -> None:
        staging = self._staging
        self._stage(step, step.context + step.query)
        self._replay(step, staging, 0)
        for row, slot in enumerate(step.slots):
            start, end = int(step.past_lengths[row]), int(step.past_lengths[row] + step.new_lengths[row])
            self._cache.write(slot, start, end, [
                array[:, row, :, staging.offsets(part, row, start, end)]
                for part, array in zip(staging.parts, staging.arrays, strict=True)
            ])  # fmt: skip

    def _replay(self, step: Step, cache: Tensors, first: int, each: bool = False) -> None:
        key = (step.batch, step.query, first, id(cache), cache.length)
        bound = self._bound.pop(key, None)
        if bound is None:
            if len(self._bound) >= _MAX_BINDINGS:
                self._bound.pop(next(iter(self._bound)))
            session = self._executables.session(self._executables.executable(step))
            bound = BoundSession(session, self._offsets(cache, first, step.batch))
        self._bound[key] = bound
        if not self._exact:
            self._cache.read_states(step, self._given_states)
        begins = np.arange(0, step.token_ids.size, step.query)
        wanted = begins + step.new_lengths - 1
        if each:
            lengths = zip(begins[: len(step.slots)], step.new_lengths, strict=False)
            wanted = np.concatenate([np.arange(n) + begin for begin, n in lengths])
        inputs = {
            "token_ids": step.token_ids, "past_lengths": step.past_lengths, "new_lengths": step.new_lengths,
            ADAPTERS: np.broadcast_to(step.row_adapters[:, None], step.token_ids.shape), LOGIT_ROWS: wanted,
        }  # fmt: skip
        for window in self._windows:
            inputs[f"{STARTS}{window}"] = cache.starts(window)[first : first + step.batch]
        bound.run(inputs, self._results)
        self._cache.keep_states(step, self._new_states)

    def _offsets(self, cache: Tensors, first: int, batch: int) -> dict[str, tuple[Array, Array]]:
        """Arrays that a graph reads and writes for each cache tensor, by entry: kv in place, states apart."""
        shape, kept = self.bundle.cache_shape, self._cache.states
        kv = {t.entry: (view, view) for t, view in zip(shape.kv, cache.rows(first, batch), strict=True)}
        given = [state[first : first + batch] for state in kept] if self._exact else self._given_states
        states = {
            t.entry: (before[:batch], after[:batch])
            for t, before, after in zip(shape.states, given, self._new_states, strict=True)
        }
        return kv | states

    def memory(self) -> dict[str, int]:
        found = super().memory()
        states = sum(state.nbytes for state in (*self._given_states, *self._new_states))
        return {**found, "cache": found["cache"] + states}

    def close(self) -> None:
        self._bound.clear()
        super().close()


class RollingTensors(Tensors):
    """Tensors for an attention operator that reads a ring buffer from its start: the tokens in it move down.

    ONNX Runtime's GroupQueryAttention needs contiguous tokens. The ring buffer therefore has more token slots than in
    the manifest (`rolling_ring`), and token p is in slot p − starts[row]. When a step does not fit, the tokens that
    must be kept move to the beginning, at most once in ROLLING_ROOM tokens. Graphs take the starts as inputs, because
    rotations use positions and the operator uses offsets. Call `make_room` before a step writes.
    """

    def _lay_out(self, slots: int, length: int, query: int) -> None:
        self.parts = tuple(_rolling(part, query) for part in self._held)
        rings = [(held.like, part.like.ring) for held, part in zip(self._held, self.parts, strict=True)]
        self._rings = {
            t.window: (t.ring, offsets) for t, offsets in rings if t.ring is not None and offsets is not None
        }
        self._starts = {window: np.zeros(slots, np.int64) for window in self._rings}
        super()._lay_out(slots, length, query)

    def starts(self, window: int) -> NDArray[np.int64]:
        found = self._starts.get(window)
        return super().starts(window) if found is None else found

    def make_room(self, row: int, past: int, end: int) -> int:
        """If more tokens are new than the ring buffer can spare, nothing old is kept."""
        if any(end - past > offsets - ring for ring, offsets in self._rings.values()):
            past = 0
        for window, (ring, offsets) in self._rings.items():
            starts = self._starts[window]
            start = int(starts[row]) if past else 0
            first = start
            if end - start > offsets:
                first = past - ring + 1 if past else end - offsets
            if past and first > start:
                self._move(window, row, first - start, past - start)
            starts[row] = first
        return past

    def _move(self, window: int | None, row: int, begin: int, end: int) -> None:
        for part, array in zip(self.parts, self.arrays, strict=True):
            if part.like.window == window:
                array[:, row, :, : end - begin] = array[:, row, :, begin:end].copy()

    def copy_row(self, source: int, target: int, length: int) -> None:
        super().copy_row(source, target, length)
        for starts in self._starts.values():
            starts[target] = starts[source] if length else 0

    def begin(self, part: TensorPart, row: int, first: int) -> None:
        """Clear the part before `first`, which would otherwise be read."""
        if part.like.window in self._starts:
            self._starts[part.like.window][row] = first

    def first(self, part: TensorPart, row: int, end: int) -> int:
        return 0 if part.like.ring is None else int(self._starts[part.like.window][row])

    def offsets(self, part: TensorPart, row: int, start: int, end: int) -> slice:
        first = self.first(part, row, end)
        return slice(start - first, end - first)

    def free(self, part: TensorPart, row: int, start: int, used: int) -> NDArray[np.int64]:
        return np.arange(max(0, start - self.first(part, row, used)), part.like.token_slots(self.length))


def _rolling(part: TensorPart, query: int) -> TensorPart:
    ring = part.like.ring
    return part if ring is None else part._replace(like=replace(part.like, ring=rolling_ring(ring, query)))
