"""OpenVINO with paged attention: one executable for every shape of step, and the cache in blocks.

A step's rows are packed, so nothing is padded, and prefill and decode share steps (`ragged`). Slots with a common
prefix share blocks, which are copied when one of them writes (paged_cache.py). If the model needs rows of one length,
rows of equal length run together, one length after another. Executables of a fixed number of tokens, if the bundle has
them, run the decode steps that they fit; a slightly smaller step is padded with rows in a block that no slot owns.

Opening a model creates OpenVINO's primitives and packs weights. This counts as a compilation of the toolchain
(CompilationCounter.opened), and no step ever waits for it.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmc.artifacts.bundle.manifest import STARTER_NAME
from llmc.errors import ArtifactError, DeviceError
from llmc.runtime.executors.base import EXECUTABLES, Capabilities, Executor, ExecutorDescription
from llmc.runtime.executors.compatibility import require_features, require_version
from llmc.runtime.executors.openvino.blocks import BLOCK, cache_names, held_widths, of_ring, rings_of
from llmc.runtime.executors.openvino.device import (
    MappedWeights,
    attentions,
    compilation_monitor,
    open_core,
    properties_for,
    read_paged,
    require_device,
    version,
    width_of,
    with_threads,
)
from llmc.runtime.executors.openvino.paged_cache import Longs, PagedCache, StateTables, StepRows, layouts_of
from llmc.runtime.step import ADAPTERS
from llmc.runtime.top_logits import TopLogits, top_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmc.artifacts.bundle.manifest import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.cache_shape import Rewind
    from llmc.runtime.executors.compilations import CompilationCounter
    from llmc.runtime.executors.openvino.paged_cache import RowBlocks
    from llmc.runtime.step import Step


Array = NDArray[np.float32]
_INTERVAL = 1 << 30
"""Interval, in tokens, at which intermediate states would be kept: longer than any step."""
_TYPES = {"f32": ov.Type.f32, "bf16": ov.Type.bf16, "u8": ov.Type.u8}


class PagedRequest:
    """An infer request over a PagedCache, and over state tables if the model has recurrent state."""

    def __init__(self, compiled: ov.CompiledModel, cache: PagedCache, states: StateTables | None = None) -> None:
        self._request = compiled.create_infer_request()
        self._pools = cache.pools
        self._states = states
        self._inputs = {port.any_name for port in compiled.inputs}
        self._outputs = [port.any_name for port in compiled.outputs if port.any_name.startswith("new_")]
        for pool in self._pools:
            for name, array in zip(pool.names, pool.cache.tensors, strict=True):
                shape = list(array.shape)
                if cache.precision != "u8":
                    shape[-1] //= _TYPES[cache.precision].size
                self._request.set_tensor(name, ov.Tensor(array, ov.Shape(shape), _TYPES[cache.precision]))
        for name in self._inputs:
            _, _, number = name.partition("_state.")
            if number and states is not None:
                self._request.set_tensor(name, ov.Tensor(states.tables[int(number)], shared_memory=True))
        self._given: list[Any] = []

    @property
    def one_length(self) -> bool:
        return bool(self._outputs)

    def infer(self, rows: StepRows, wanted: Longs, top_k: int) -> tuple[Array, TopLogits | None]:
        """Logits [len(wanted), V] of the wanted tokens, and with `top_k` also their largest ones."""
        given: dict[str, NDArray[Any]] = {
            "input_ids": rows.token_ids, "position_ids": rows.positions, "subsequence_begins": rows.begins,
            "rows": wanted,
        }  # fmt: skip
        if ADAPTERS in self._inputs:
            given[ADAPTERS] = np.repeat(rows.adapters, np.diff(rows.begins))
        for pool, there in zip(self._pools, rows.pools, strict=True):
            given |= self._of_pool(pool.ring, there, len(rows.token_ids))
        if self._states is not None:
            given |= self._of_states(rows, self._states)
        request = self._request
        for name, array in given.items():
            request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        request.infer()
        self._given = list(given.values())
        for name in self._outputs:
            self._keep(name, rows)
        top = [request.get_tensor(name).data for name in (("top_values", "top_ids") if top_k else ())]
        return request.get_tensor("logits").data, TopLogits(*top) if top else None

    def _of_states(self, rows: StepRows, states: StateTables) -> dict[str, NDArray[Any]]:
        """Where states are read and written; a row without a past reads zeros."""
        read = np.where(rows.past > 0, rows.slots, np.int32(states.zeros))
        return {
            "state_rows": np.stack([read, rows.slots], 1).ravel(),
            "state_begins": np.arange(0, 2 * len(read) + 1, 2, dtype=np.int32),
            "state_interval": np.full(len(read), _INTERVAL, np.int32),
        }

    def _of_pool(self, ring: int | None, rows: RowBlocks, tokens: int) -> dict[str, NDArray[Any]]:
        """Row locations in a pool, as far as the model takes them; `tokens` of the step."""
        found: dict[str, NDArray[Any]] = {
            "past_lens": rows.past, "block_indices": rows.blocks, "block_indices_begins": rows.begins,
            "max_context_len": rows.longest,
        }  # fmt: skip
        if self.one_length:
            tables = rows.tables
            batch, blocks = tables.shape
            found["block_tables"] = tables
            found["step_sizes"] = np.array([batch, tokens // batch, blocks * BLOCK], np.int32)
        named = {of_ring(name, ring): array for name, array in found.items()}
        return {name: array for name, array in named.items() if name in self._inputs}

    def _keep(self, name: str, rows: StepRows) -> None:
        """Write what the model returns instead of writing it itself."""
        built, (what, _, number) = self._request.get_tensor(name).data, name.partition(".")
        if what == "new_state":
            assert self._states is not None
            self._states.tables[int(number)][rows.slots] = built
            return
        held = f"{what.removeprefix('new_')}_cache.{number}"
        pool, there = next((p, r) for p, r in zip(self._pools, rows.pools, strict=True) if held in p.names)
        offsets = there.past[:, None] + np.arange(built.shape[2], dtype=np.int32)
        blocks = np.take_along_axis(there.tables, offsets // BLOCK, 1)
        pool.cache.put(pool.names.index(held), blocks, offsets % BLOCK, built.transpose(0, 2, 1, 3))


PACKED = 1.5
"""Memory of an open fixed-size model relative to its weights in the file: 204–215 MB for 137 (benchmarks/RESULTS.md)"""

_CONSTANT = re.compile(rb'offset="(\d+)"[^>]* size="(\d+)"')


class PagedModels:
    """The model for every shape, and those for fixed numbers of decode rows, as many as the memory budget allows."""

    def __init__(
        self, bundle: Bundle, cache: PagedCache, slots: int, threads: int, compilations: CompilationCounter
    ) -> None:
        self._bundle = bundle
        self._cache = cache
        self._slots = slots
        self.states: StateTables | None = None
        """The tables of recurrent state, if any, once the first model is open."""
        self._compilations = compilations
        self._threads = threads
        self._weights = MappedWeights(bundle.files.path("weights"))
        self._any: PagedRequest | None = None
        self.fixed: dict[int, PagedRequest] = {}
        """Open requests by number of rows."""
        self._unopened = self._hottest_first()
        self._opener: threading.Thread | None = None

    @property
    def open_count(self) -> int:
        return len(self.fixed) + (self._any is not None)

    def request(self, rows: int) -> PagedRequest:
        """The request of the model for `rows` rows, or for every shape (0)."""
        request = self.fixed[rows] if rows else self._any
        assert request is not None
        return request

    def filled(self, rows: StepRows, count: int) -> tuple[StepRows, Longs]:
        """Append padding rows up to `count`; also returns the last token of each row."""
        return rows.filled(
            count, [pool.filler for pool in self._cache.pools], 0 if self.states is None else self.states.filler
        )

    def open_any(self) -> None:
        """Open the model for every shape. Raises ArtifactError or DeviceError."""
        self._any = self._open(self._bundle.executable("any", None, None, None))

    def open_fixed(self) -> None:
        if self._opener is not None:
            self._opener.join()
        self._open_affordable()

    def _open_affordable(self) -> None:
        """Open as many of them as the memory budget allows; they all hold the same weights."""
        if self._unopened:
            size = PACKED * held_bytes(self._bundle.files.read(self._unopened[0][1].blob))
            del self._unopened[int(self._bundle.option("specialise_memory") / size) :]
        while self._unopened:
            rows, executable = self._unopened.pop(0)
            self.fixed = {**self.fixed, rows: self._open(executable)}

    def open_fixed_behind(self) -> None:
        """Open them while steps run, if not yet started."""
        if self._unopened and self._opener is None:
            self._opener = threading.Thread(target=self._open_quietly, name="llmc-open", daemon=True)
            self._opener.start()

    def _open_quietly(self) -> None:
        """Open in the background. A model that fails is replaced by the one for every shape."""
        try:
            self._open_affordable()
        except (ArtifactError, DeviceError):
            self._unopened.clear()

    def _hottest_first(self) -> list[tuple[int, Executable]]:
        """Fixed-size models: the largest decode batch, which a busy server runs, then one row, then descending."""
        executables = self._bundle.manifest.executables
        fixed = sorted(((e.batch, e) for e in executables if e.phase == "decode" and e.batch), key=lambda f: -f[0])
        return fixed[:1] + sorted(fixed[1:], key=lambda f: (f[0] != 1, -f[0]))

    def _open(self, executable: Executable) -> PagedRequest:
        source = f"{self._bundle.path}: {executable}"
        manifest = self._bundle.manifest
        shape = self._bundle.cache_shape
        model = read_paged(self._bundle.files.read(executable.blob), self._weights, shape, source)
        layouts = _layouts(model, self._bundle, self._cache.precision, source)
        try:
            properties = properties_for(manifest.options, executable.batch) | with_threads(self._threads)
        except (KeyError, TypeError, ValueError, StopIteration) as e:
            raise ArtifactError(
                f"{source}: the manifest does not say how it is opened ({type(e).__name__}: {e}); compile again: "
                f"{self._bundle.recompile_hint}"
            ) from e
        try:
            compiled = open_core().compile_model(model, "CPU", properties)
            self._compilations.opened(str(executable))
            if self.states is None and shape.states:
                most = max((e.batch or 1) for e in manifest.executables)
                self.states = StateTables(shape.states, layouts, self._slots, most)
            request = PagedRequest(compiled, self._cache, self.states)
            request.infer(
                *self.filled(StepRows.none(len(self._cache.pools)), executable.batch or 1), 0
            )  # which packs the weights
        except RuntimeError as e:
            raise DeviceError(f"{source}: OpenVINO cannot open it: {str(e).splitlines()[-1]}") from e
        self._weights.drop_pages()
        return request

    def close(self) -> None:
        self._unopened.clear()
        if self._opener is not None:
            self._opener.join()
        self.fixed = {}
        self._any = None


def _layouts(model: Any, bundle: Bundle, precision: str, source: str) -> list[str]:
    """The layouts of the model's states. Raises ArtifactError for sizes, which would read beyond caches, or precisions
    that differ from the manifest's.
    """
    shape = bundle.cache_shape
    held = held_widths(precision, shape.kv)
    widths = {name: t.shape[0] * width for name, t, width in zip(cache_names(shape), shape.kv, held, strict=True)}
    inputs = {name: port for port in model.inputs for name in port.get_names()}
    whole = widths.keys() == {name for name in inputs if "_cache." in name}
    pools = {name.partition(".")[2] for name in inputs if name.startswith(("block_indices.", "block_tables."))}
    whole = whole and pools == {str(ring) for ring in rings_of(shape.kv)}
    for node, caches in attentions(model):
        queries, *given = (width_of(node.input(i)) for i in range(3))
        whole = (
            whole and given == [widths.get(cache.get_friendly_name()) for cache in caches] and not queries % given[0]
        )
    whole = whole and [width_of(o) for o in model.outputs if "logits" in o.get_names()] == [bundle.size("vocab_size")]
    whole = whole and (ADAPTERS in inputs) == bool(bundle.adapters)
    try:
        tables = {name: port.get_partial_shape() for name, port in inputs.items() if "_state." in name}
        layouts = layouts_of({name: tuple(d.get_length() for d in list(t)[1:]) for name, t in tables.items()}, shape)
    except (ValueError, RuntimeError):
        whole = False
    if not whole:
        raise ArtifactError(
            f"{source} is not a graph of the sizes that the manifest states; compile again: {bundle.recompile_hint}"
        )
    return layouts


def held_bytes(xml: bytes) -> int:
    """Bytes of a weights file that a model's constants use; several may share bytes."""
    return sum({int(offset): int(size) for offset, size in _CONSTANT.findall(xml)}.values())


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
        self._leave_starter()
        self._models.open_fixed()

    def run(self, step: Step) -> Array:
        self._run(step, each=False)
        return self.logits()

    def run_each(self, step: Step) -> Array:
        return self._run(step, each=True)

    def run_top(self, step: Step) -> TopLogits:
        """The graph's TopK is stable, so ties are ordered by lower id."""
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
            logits = self._starter.run(step, each)
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
        return logits[:kept], None if top is None else TopLogits(top.values[:kept], top.ids[:kept])

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

    def run(self, step: Step, each: bool) -> Array:
        """Logits after the last token of each live row, or after `each` live token. Rows run one after another."""
        built = []
        for row, slot in enumerate(step.slots):
            new, past = int(step.new_lengths[row]), int(step.past_lengths[row])
            one = replace(
                step, slots=(slot,), context=past, token_ids=step.token_ids[row : row + 1, :new],
                past_lengths=step.past_lengths[row : row + 1], new_lengths=step.new_lengths[row : row + 1],
                adapters=step.adapters[row : row + 1],
            )  # fmt: skip
            result = self.executor.run_each(one) if each else self.executor.run(one)
            built.append(result[: new if each else 1].copy())
        return np.concatenate(built)

    def hand_over(self, used: Sequence[int], rewind: Rewind, take: Callable[[int, int, list[Array]], None]) -> None:
        """Wait until the other's models are open, and pass the tokens of every slot to `take`.

        Of ring buffers, those that any start that the other's `rewind` allows may see. Raises errors from opening them.
        """
        self.open_other()
        assert self._opened is not None
        self._opened.result()
        for slot, length in enumerate(list(used)):
            if length:
                take(slot, length, self._prefix(slot, length, rewind.floor(length)))
        self.close()

    def _prefix(self, slot: int, length: int, floor: int) -> list[Array]:
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
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.executor.close()
