"""A bundle's paged models, opened over one weights file, one block cache and the recurrent states of its slots.

Opening a model creates OpenVINO's primitives and packs weights. This counts as a compilation of the toolchain
(CompilationCounter.opened), and no step ever waits for it.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmc.errors import ArtifactError, DeviceError
from llmc.runtime.executors.openvino.blocks import BLOCK, cache_names, held_widths, of_ring, rings_of
from llmc.runtime.executors.openvino.device import (
    MappedWeights,
    attentions,
    open_core,
    properties_for,
    read_paged,
    width_of,
    with_threads,
)
from llmc.runtime.executors.openvino.paged_cache import Longs, StepRows
from llmc.runtime.executors.openvino.states import StateTables, layouts_of
from llmc.runtime.step import ADAPTERS

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.compilations import CompilationCounter
    from llmc.runtime.executors.openvino.paged_cache import PagedCache, RowBlocks

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
        """Whether all rows of a step must have one length."""
        return bool(self._outputs)

    def infer(self, rows: StepRows, wanted: Longs, top_k: int) -> tuple[NDArray[np.float32], Any]:
        """Logits [len(wanted), V] of the wanted tokens, and with `top_k` also (values, ids) [len(wanted), top_k]."""
        given: dict[str, NDArray[Any]] = {
            "input_ids": rows.token_ids, "position_ids": rows.positions, "subsequence_begins": rows.begins,
            "rows": wanted,
        }  # fmt: skip
        if ADAPTERS in self._inputs:
            given[ADAPTERS] = rows.token_adapters
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
        logits: NDArray[np.float32] = request.get_tensor("logits").data
        if not top_k:
            return logits, None
        return logits, (request.get_tensor("top_values").data, request.get_tensor("top_ids").data)

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
        """Number of open models."""
        return len(self.fixed) + (self._any is not None)

    def request(self, rows: int) -> PagedRequest:
        """The request of the model for `rows` rows, or for every shape (0)."""
        request = self.fixed[rows] if rows else self._any
        assert request is not None
        return request

    def filled(self, rows: StepRows, count: int) -> tuple[StepRows, Longs]:
        """Append padding rows up to `count`; also returns the last token of each row."""
        return rows.filled(count, self._cache.fillers, 0 if self.states is None else self.states.filler)

    def open_any(self) -> None:
        """Open the model for every shape. Raises ArtifactError or DeviceError."""
        self._any = self._open(self._bundle.executable("any", None, None, None))

    def open_fixed(self) -> None:
        """Open the models of fixed sizes before returning."""
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
        """Close all models."""
        self._unopened.clear()
        if self._opener is not None:
            self._opener.join()
        self.fixed = {}
        self._any = None


def _layouts(model: Any, bundle: Bundle, precision: str, source: str) -> list[str]:
    """The layouts of the model's states.

    Raises ArtifactError if the model's sizes or precision differ from the manifest's: it would read beyond caches.
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
