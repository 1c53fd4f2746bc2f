"""OpenVINO models of one shape each, over contiguous slots: for devices without paged attention.

A model reads a cache of exactly its context and returns the new tokens, which the executor writes to the cache. Decode
steps over the same slots in the same bucket copy only these and recurrent states, which models read and return whole.
Models run on the bundle's device if this host has it, otherwise on the CPU, which proves plan, padding and numbers as
verification does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from llmc.runtime.executors.base import EXECUTABLES, ExecutorDescription, StaticExecutor
from llmc.runtime.executors.compatibility import require_features, require_version
from llmc.runtime.executors.openvino.device import (
    compilation_monitor,
    has_device,
    host_of,
    plugin_name,
    require_device,
    version,
)
from llmc.runtime.executors.openvino.static_models import StaticModels
from llmc.runtime.executors.slot_cache import Array, SlotCache, SlotCacheExecutor, Tensors, parts_of
from llmc.runtime.top_logits import TopLogits

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.openvino.static_models import StaticRequest
    from llmc.runtime.step import Step

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
        here = not bundle.settings.open_portable and has_device(plugin_name(wanted))
        self.device = wanted if here else "CPU"
        self.compilations.monitors.append(compilation_monitor())
        self.capabilities = replace(self.capabilities, in_place_of="" if wanted == self.device else wanted)
        rows, longest = (max(values) for values in zip(*decode, strict=True))
        self._cache: ContextCache = ContextCache(shape, slots, capacity, rows, longest)
        self._staging = Tensors(parts_of(shape), max(staged, default=0))
        most = max(b.batch for b in buckets)
        self._given_states = [np.zeros(t.size(most, 0), np.float32) for t in shape.states]
        self._models = StaticModels(bundle, self.device, threads, bundle.sample_top_k, self.compilations)

    def open_all(self) -> None:
        self._models.keep_all()
        super().open_all()

    def _open(self, executable: Executable) -> StaticRequest:
        return self._models.request(executable, serving=False)

    def run(self, step: Step) -> Array:
        """Run a step at the model's shape. Dummy rows read other slots' tokens, and write nothing."""
        self._run(step)
        return self.logits()

    def run_top(self, step: Step) -> TopLogits:
        """Run a step and return the top logits; the model's TopK is stable, so ties are ordered by lower id."""
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
        """Bytes of homes, layouts and states, and the number of open models."""
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
    """The cached tokens of `slots` sequences. Models read exactly their context of it and do not write.

    The host writes the new tokens after each step. While decode steps keep one context and one set of slots, only new
    tokens are copied.
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
