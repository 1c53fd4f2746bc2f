"""A bundle's paged models, opened over one weights file, one block cache and the states of its slots.

OpenVINO makes its primitives and packs weights when a model is opened: a compilation of the toolchain, counted as such
(CompilationCounter.opened), and never one that a step waits for.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

from llmc.errors import ArtifactError, DeviceError
from llmc.runtime.executors.openvino.blocks import cache_names, held_widths, rings_of
from llmc.runtime.executors.openvino.device import (
    MappedWeights,
    attentions,
    open_core,
    properties_for,
    read_paged,
    width_of,
    with_threads,
)
from llmc.runtime.executors.openvino.paged_request import PagedRequest
from llmc.runtime.executors.openvino.paged_rows import Longs, StepRows
from llmc.runtime.executors.openvino.states import StateTables, layouts_of
from llmc.runtime.step import ADAPTERS

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.compilations import CompilationCounter
    from llmc.runtime.executors.openvino.paged_cache import PagedCache

PACKED = 1.5
"""Memory of an open model of a fixed size over its weights in the file: 204–215 MB for 137 (benchmarks/RESULTS.md)"""

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
        """The states of models that keep any, once the first is open."""
        self._compilations = compilations
        self._threads = threads
        self._weights = MappedWeights(bundle.files.path("weights"))
        self._any: PagedRequest | None = None
        self.fixed: dict[int, PagedRequest] = {}
        """By number of rows, what is open."""
        self._unopened = self._hottest_first()
        self._opener: threading.Thread | None = None

    @property
    def open_count(self) -> int:
        """Models open now."""
        return len(self.fixed) + (self._any is not None)

    def request(self, rows: int) -> PagedRequest:
        """The request of the model for `rows` rows, or for every shape (0)."""
        request = self.fixed[rows] if rows else self._any
        assert request is not None
        return request

    def filled(self, rows: StepRows, count: int) -> tuple[StepRows, Longs]:
        """With rows of no slot up to `count`; and the last token of each row."""
        return rows.filled(count, self._cache.fillers, 0 if self.states is None else self.states.filler)

    def open_any(self) -> None:
        """Open the model for every shape. Raises ArtifactError or DeviceError."""
        self._any = self._open(self._bundle.executable("any", None, None, None))

    def open_fixed(self) -> None:
        """Open the models of fixed sizes, before returning."""
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
        """Open them beside the steps that run, if that has not begun."""
        if self._unopened and self._opener is None:
            self._opener = threading.Thread(target=self._open_quietly, name="llmc-open", daemon=True)
            self._opener.start()

    def _open_quietly(self) -> None:
        """What fails stays unopened: the model for every shape serves in its place."""
        try:
            self._open_affordable()
        except (ArtifactError, DeviceError):
            self._unopened.clear()

    def _hottest_first(self) -> list[tuple[int, Executable]]:
        """The models of fixed sizes: the largest decode batch, which a busy server runs, then one row, then the others
        from the largest down."""
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
        """Drop what is open."""
        self._unopened.clear()
        if self._opener is not None:
            self._opener.join()
        self.fixed = {}
        self._any = None


def _layouts(model: Any, bundle: Bundle, precision: str, source: str) -> list[str]:
    """The layouts of the model's states. Raises ArtifactError for a model that is not of the manifest's sizes, or of
    another precision's: it would read beyond caches."""
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
    """Bytes of a weights file that a model's constants are in; several may be in the same place."""
    return sum({int(offset): int(size) for offset, size in _CONSTANT.findall(xml)}.values())
