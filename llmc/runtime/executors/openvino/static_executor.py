"""OpenVINO models of one shape each, over contiguous slots: for devices without paged attention.

A model reads a cache of exactly its context and returns the new tokens, which the executor writes to the cache. Decode
steps over the same slots in the same bucket copy only these and recurrent states, which models read and return whole.
Models run on the bundle's device if this host has it, otherwise on the CPU, which proves plan, padding and numbers as
verification does.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import openvino as ov

from llmc.artifacts.bundle.trust import HEAD_BYTES, code_in
from llmc.errors import ArtifactError
from llmc.runtime.executors.base import EXECUTABLES, ExecutorDescription, StaticExecutor
from llmc.runtime.executors.compatibility import require_features, require_version
from llmc.runtime.executors.openvino.blobs import FORM, DeviceBlob, open_blob
from llmc.runtime.executors.openvino.device import (
    WHOLE_SHAPES,
    MappedWeights,
    compilation_monitor,
    has_device,
    host_of,
    open_core,
    plugin_name,
    require_device,
    version,
    with_threads,
)
from llmc.runtime.executors.slot_cache import Array, SlotCache, SlotCacheExecutor, Tensors, parts_of
from llmc.runtime.step import Step
from llmc.runtime.top_logits import TopLogits

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.cache_shape import CacheShape
    from llmc.runtime.executors.compilations import CompilationCounter


_STEP = ("token_ids", "past_lengths", "new_lengths")
LEAST_OPEN = 2


class StaticModels:
    """Requests for executables. Each open one holds another copy of the weights, packed for its kernels.

    To verify a plan of many buckets within memory, the most recently used stay open while they fit in half of the
    initially free memory; `keep_all` ends that.
    """

    def __init__(self, bundle: Bundle, device: str, threads: int, compilations: CompilationCounter) -> None:
        self._bundle = bundle
        self._device = device
        self._compilations = compilations
        self._weights = MappedWeights(bundle.files.path("weights"))
        self._properties = with_threads(threads) | WHOLE_SHAPES if device == "CPU" else {}
        self._open: OrderedDict[str, StaticRequest] = OrderedDict()
        each = max(1, bundle.files.path("weights").stat().st_size)
        self._most: float = max(LEAST_OPEN, _free_memory() // (2 * each))

    def __len__(self) -> int:
        return len(self._open)

    def keep_all(self) -> None:
        self._most = float("inf")

    def request(self, executable: Executable, serving: bool) -> StaticRequest:
        """`serving`: a step waits for it, so compiling it counts as such. Raises ArtifactError."""
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
            return StaticRequest(compiled, self._bundle.cache_shape, *shape, states, self._bundle.sample_top_k)
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

        `past` has rows of the model's context, at least as many as its batch, if it has any; `states` are [≥ B, …].
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


DEVICE = "openvino_device"
"""Manifest option that names the device: CPU, GPU, GPU.1, NPU, NPU.4000 …"""


class OpenVinoStaticExecutor(SlotCacheExecutor, StaticExecutor):
    """Runs OpenVINO models of static shape."""

    description: ClassVar[ExecutorDescription] = ExecutorDescription({"weights": "data", EXECUTABLES: "by first bytes"})

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        require_version(bundle, "openvino", version(), "OpenVINO")
        if bundle.manifest.isa:
            require_features(bundle, "CPU")
        require_device("CPU")

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        buckets = bundle.plan.buckets
        shape = bundle.cache_shape
        decode = [(b.batch, b.context) for b in buckets if b.phase == "decode"] or [(0, 0)]
        staged = [b.batch * b.context for b in buckets if b.phase == "prompt"]
        wanted = str(bundle.manifest.options.get(DEVICE, "CPU"))
        here = not bundle.settings.open_portable and has_device(wanted)
        self.device = wanted if here else "CPU"
        self.compilations.monitors.append(compilation_monitor())
        self.capabilities = replace(self.capabilities, in_place_of="" if wanted == self.device else wanted)
        rows, longest = (max(values) for values in zip(*decode, strict=True))
        self._cache: ContextCache = ContextCache(shape, slots, capacity, rows, longest)
        self._staging = Tensors(parts_of(shape), max(staged, default=0))
        most = max(b.batch for b in buckets)
        self._given_states = [np.zeros(t.size(most, 0), np.float32) for t in shape.states]
        self._models = StaticModels(bundle, self.device, threads, self.compilations)

    def open_all(self) -> None:
        self._models.keep_all()
        super().open_all()

    def _open(self, executable: Executable) -> StaticRequest:
        return self._models.request(executable, serving=False)

    def run(self, step: Step) -> Array:
        """Dummy rows read other slots' tokens, and write nothing."""
        self._run(step)
        return self.logits()

    def run_top(self, step: Step) -> TopLogits:
        """The model's TopK is stable, so ties are ordered by lower id."""
        self._require_top()
        top = self._run(step)
        assert top is not None
        return top

    def _run(self, step: Step) -> TopLogits | None:
        self._check_step(step, self._cache.held, first_slots=True)
        request = self._models.request(self._executable(step), serving=True)
        self._cache.read_states(step, self._given_states)
        logits, top = request.infer(step, self._past(step), self._given_states)
        self._keep(logits)
        self._cache.append(step, request.new)
        self._cache.keep_states(step, request.new_states)
        return top

    def _past(self, step: Step) -> Tensors | None:
        """The first `context` tokens of each row's slot."""
        if not step.context:
            return None
        if step.phase == "decode":
            return self._cache.begin_decode(step)
        self._stage(step, step.context)
        return self._staging

    def memory(self) -> dict[str, int]:
        states = sum(state.nbytes for state in self._given_states)
        cache = self._cache.nbytes + self._staging.nbytes + states
        return {"cache": cache, "open_executables": len(self._models)}

    def close(self) -> None:
        self._models.close()
        self._logits = None


class OpenVinoGpuExecutor(OpenVinoStaticExecutor):
    """For bundles compiled on the host of a GPU: its plugin imports their models."""

    description: ClassVar[ExecutorDescription] = ExecutorDescription(
        {"weights": "data", EXECUTABLES: "code"}, host=partial(host_of, "GPU")
    )


class OpenVinoNpuExecutor(OpenVinoStaticExecutor):
    """For bundles compiled on the host of an NPU, for its platform."""

    description: ClassVar[ExecutorDescription] = replace(OpenVinoGpuExecutor.description, host=partial(host_of, "NPU"))


class ContextCache(SlotCache):
    """Models read exactly their context of the cache, and the host writes the new tokens after each step.

    While decode steps keep one context and one set of slots, only new tokens are copied.
    """

    def begin_decode(self, step: Step) -> Tensors:
        return super().begin_decode(replace(step, context=step.context - 1))

    def append(self, step: Step, new: Sequence[Array]) -> None:
        """Keep only the live rows' live tokens of each part of `new`, [tensors, batch, heads, query, width]."""
        if step.phase != "decode" or not step.context:
            for row, slot in enumerate(step.slots):
                start, count = int(step.past_lengths[row]), int(step.new_lengths[row])
                self.write(slot, start, start + count, [part[:, row, :, :count] for part in new])
            return
        past = step.past_lengths[: len(step.slots)]
        within = np.flatnonzero(past < self.decode.length)
        for kept, array, part in zip(self.decode.parts, self.decode.arrays, new, strict=True):
            offsets = past[within] if kept.like.ring is None else past[within] % kept.like.ring
            array[:, within, :, offsets] = part[:, within][:, :, :, 0].swapaxes(0, 1)
        for slot in step.slots:
            start = int(past[slot])
            if start < self.decode.length:
                self._at_home[slot] = min(self._at_home[slot], start)
                self._in_decode[slot] = start + 1
                self.held.wrote(slot, start, start + 1)
            else:
                self.write(slot, start, start + 1, [part[:, slot] for part in new])
