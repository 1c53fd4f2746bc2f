"""A bundle's static models, opened on first use: native ones imported, portable ones compiled."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmc.artifacts.bundle.native import HEAD_BYTES, code_in
from llmc.errors import ArtifactError
from llmc.runtime.executors.openvino.blobs import FORM, DeviceBlob, open_blob
from llmc.runtime.executors.openvino.device import (
    WHOLE_SHAPES,
    MappedWeights,
    open_core,
    plugin_name,
    version,
    with_threads,
)
from llmc.runtime.executors.slot_cache import Tensors, parts_of
from llmc.runtime.step import Step
from llmc.runtime.top_logits import TopLogits

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.cache_shape import CacheShape
    from llmc.runtime.executors.compilations import CompilationCounter

Array = NDArray[np.float32]
_STEP = ("token_ids", "past_lengths", "new_lengths")
LEAST_OPEN = 2


class StaticModels:
    """Requests for executables. Each open one holds another copy of the weights, packed for its kernels.

    To verify a plan of many buckets within memory, the most recently used stay open while they fit in half of the
    initially free memory; `keep_all` ends that.
    """

    def __init__(
        self, bundle: Bundle, device: str, threads: int, top_k: int, compilations: CompilationCounter
    ) -> None:  # fmt: skip
        self._bundle = bundle
        self._device = device
        self._top_k = top_k
        self._compilations = compilations
        self._weights = MappedWeights(bundle.files.path("weights"))
        self._properties = with_threads(threads) | WHOLE_SHAPES if device == "CPU" else {}
        self._open: OrderedDict[str, StaticRequest] = OrderedDict()
        each = max(1, bundle.files.path("weights").stat().st_size)
        self._most: float = max(LEAST_OPEN, _free_memory() // (2 * each))

    def __len__(self) -> int:
        return len(self._open)

    def keep_all(self) -> None:
        """Close nothing from now on."""
        self._most = float("inf")

    def request(self, executable: Executable, serving: bool) -> StaticRequest:
        """The request of an executable. `serving`: a step waits for it, so compiling it counts as such.

        Raises ArtifactError if OpenVINO cannot open it.
        """
        key = executable.blob
        if key not in self._open:
            while len(self._open) >= self._most:
                self._open.popitem(last=False)
            self._open[key] = self._opened(executable, serving)
        self._open.move_to_end(key)
        return self._open[key]

    def _opened(self, executable: Executable, serving: bool) -> StaticRequest:
        source, again = f"{self._bundle.path}: {executable}", self._bundle.recompile_hint
        data = self._bundle.files.read(executable.blob)
        native = executable.state == "native" or code_in(data[:HEAD_BYTES]) is not None
        if native:
            self._bundle.files.require_native(str(executable))
        if native and data.startswith(FORM.magic[:-1]):
            native = self._device != "CPU"
            compiled = self._of_device(data, source, again)
        elif native:
            compiled = open_blob(data, self._bundle.files.path("weights"), self._options(), source, again)
        else:
            compiled = self._compiled(data, source, again)
        self._weights.drop_pages()
        if native or not serving:
            self._compilations.opened(str(executable))
        else:
            self._compilations.record(str(executable))
        assert executable.batch is not None
        assert executable.query is not None
        shape = executable.batch, executable.query, executable.context or 0
        try:
            if compiled.output("logits").shape[-1] != self._bundle.size("vocab_size"):
                raise ValueError("its logits are not as many as the manifest's vocabulary")
            states = not self._bundle.plan.limits.contexts
            return StaticRequest(compiled, self._bundle.cache_shape, *shape, states, self._top_k)
        except ValueError as e:
            raise ArtifactError(f"{source} is not a model of that shape: {e}; compile again: {again}") from e

    def _options(self) -> dict[str, object]:
        requested = self._bundle.manifest.options["properties"] if self._device == "CPU" else {}
        return {**requested, **self._properties}

    def _of_device(self, data: bytes, source: str, again: str) -> ov.CompiledModel:
        """The part for the device if this host has it, otherwise the portable one on this CPU."""
        blob = DeviceBlob.parse(data, source)
        if self._device == "CPU":
            return self._compiled(blob.ir, source, again)
        return blob.open_on(self._device, source, again)

    def _compiled(self, xml: bytes, source: str, again: str) -> ov.CompiledModel:
        """Compile a portable model as the device's own host does."""
        try:
            model = open_core().read_model(xml, self._weights.tensor)
            return open_core().compile_model(model, plugin_name(self._device), self._options())
        except RuntimeError as e:
            reason = next((line for line in reversed(str(e).splitlines()) if line.strip()), "")
            raise ArtifactError(
                f"{source}: OpenVINO {version()} cannot compile it for {self._device} ({reason.strip()}); compile "
                f"again: {again}"
            ) from e

    def close(self) -> None:
        """Close everything."""
        self._open.clear()


def _free_memory() -> int:
    """Bytes of free memory; the system's caches count as used."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


class StaticRequest:
    """A compiled model of `batch` rows, `query` new tokens and a cache of `context` tokens.

    Inputs and outputs are stated in targets/openvino/static.py. Buffers are bound once and shared with OpenVINO, so a
    step copies only its tokens and lengths. It takes recurrent states if it has a context, or with `states`. Raises
    ValueError, naming the difference, for a model of another shape.
    """

    def __init__(
        self, compiled: ov.CompiledModel, shape: CacheShape, batch: int, query: int, context: int, states: bool,
        top_k: int,
    ) -> None:  # fmt: skip
        self._request = compiled.create_infer_request()
        self._kv = [f"past_{t.entry}" for t in shape.kv] if context else []
        self._states = [f"past_{t.entry}" for t in shape.states] if context or states else []
        taken = {f"past_{t.entry}": t.size(batch, context) for t in shape}
        wanted = {"token_ids": (batch, query), "past_lengths": (batch,), "new_lengths": (batch,)}
        wanted |= {name: taken[name] for name in (*self._kv, *self._states)}
        _require(compiled.inputs, wanted, "takes")
        tops = dict.fromkeys(("top_values", "top_ids"), (batch, top_k)) if top_k else {}
        built = {**tops, **{f"new_{t.entry}": t.size(batch, query) for t in shape.without_rings}}
        _require([o for o in compiled.outputs if o.any_name != "logits"], built, "returns")
        new = Tensors([part.unrolled for part in parts_of(shape)], batch * query)
        new.reserve(batch, query)
        self.new: list[Array] = new.arrays
        """New cache tokens of the last step: its parts (slot_cache.py), [tensors, batch, heads, query, width]."""
        self.new_states: list[Array] = [np.zeros(t.size(batch, 0), np.float32) for t in shape.states]
        """States after the last step, [batch, …]."""
        for held, arrays in ((shape.kv, new.rows(0, batch)), (shape.states, self.new_states)):
            for t, array in zip(held, arrays, strict=True):
                self._request.set_tensor(f"new_{t.entry}", ov.Tensor(array, shared_memory=True))
        self._given = {name: np.zeros(wanted[name], np.int32) for name in _STEP}
        for name, given in self._given.items():
            self._request.set_tensor(name, ov.Tensor(given, shared_memory=True))
        self._top = bool(top_k)
        self._bound: tuple[Any, ...] = ()

    def infer(self, step: Step, past: Tensors | None, states: Sequence[Array]) -> tuple[Array, TopLogits | None]:
        """Logits [B, V] and, if the model returns them, the largest; both in the request's memory.

        `past` has rows of the model's context, at least as many as its batch; None for a model without a context.
        `states` are [≥ B, …].
        """
        for name in _STEP:
            self._given[name][...] = getattr(step, name)
        rows = [] if past is None else past.rows(0, step.batch)
        self._bind([*self._kv, *self._states], [*rows, *(state[: step.batch] for state in states)])
        self._request.infer()
        logits: Array = self._request.get_tensor("logits").data
        if not self._top:
            return logits, None
        values, ids = (self._request.get_tensor(name).data for name in ("top_values", "top_ids"))
        return logits, TopLogits(values, ids.astype(np.int64))

    def _bind(self, names: Sequence[str], arrays: Sequence[Array]) -> None:
        """Bind the cache's inputs to `arrays`, unless their addresses are unchanged."""
        index = tuple((array.ctypes.data, array.shape) for array in arrays[: len(names)])
        if index != self._bound:
            for name, array in zip(names, arrays, strict=False):
                self._request.set_tensor(name, ov.Tensor(array, shared_memory=True))
            self._bound = index


def _require(ports: Any, wanted: dict[str, tuple[int, ...]], does: str) -> None:
    found = {port.any_name: tuple(port.shape) for port in ports}
    if found != wanted:
        name = next(n for n in (*wanted, *found) if found.get(n) != wanted.get(n))
        raise ValueError(f"it {does} {name} {found.get(name, 'not at all')}, not {wanted.get(name, 'not at all')}")
