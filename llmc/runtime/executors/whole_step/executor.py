"""Executors whose steps are graphs of fixed shapes on an accelerator, reading and writing the cache (step.py).

Weights are copied to the accelerator once. A host without one replays the same programs on its CPU, like the executor
"torch", and reports that (`in_place_of`): it proves their numbers, and times are meaningless. One module per executor
uses the vendor's software.
"""

from __future__ import annotations

import gc
import logging
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from llmc.buckets.capture.log import took_line
from llmc.buckets.render.text import size_text
from llmc.runtime.executors.slots import SlotLengths, slots_in
from llmc.runtime.executors.torch.executor import OpenedProgram, TorchExecutor
from llmc.runtime.executors.whole_step.step import AcceleratorCache, Run, TorchAccelerator, dtype_of
from llmc.runtime.host import available_memory, host_memory
from llmc.runtime.step import pad

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.buckets.bucket import Bucket
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.step import Step

_log = logging.getLogger("llmc")


class StepMode(Protocol):
    """Whether graphs are captured, and whether nothing is compiled as a whole either. str() gives its name in logs."""

    @property
    def eager(self) -> bool: ...

    @property
    def captures(self) -> bool: ...


class AcceleratorExecutor(TorchExecutor):
    """Runs whole-step graphs on `accelerator`. `accelerator` and `mode` must be set before `__init__`."""

    accelerator: TorchAccelerator
    mode: StepMode
    _graph_device: ClassVar[type[AcceleratorGraphs]]
    """The accelerator as a graph-capturing device, if the mode captures."""
    _cache: AcceleratorCache
    _graphs: dict[str, Any]
    """Captured graphs by executable. A graph reads and writes fixed addresses; `reset` releases its memory."""

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        self._on_device: dict[str, Any] = {}
        self._runs: dict[str, Run] = {}
        self._graphs = {}
        super().__init__(bundle, slots, capacity, threads)
        captures = self._graph_device(self, self.accelerator, self._cache) if self.mode.captures else None
        self.capabilities = replace(self.capabilities, eager=self.mode.eager, graph_device=captures)
        _log.info("%s: %s on %s", bundle.path, self.mode, self.accelerator.name)
        loading = f"Pre-loading model weights on {self.accelerator.device}"
        with took(self.accelerator, loading), self._torch.inference_mode():
            for name in self._weights.names():
                self._on_device[name] = self.accelerator.put(self._weights.tensor(name))

    @abstractmethod
    def _run_of(self, executable: Executable, opened: OpenedProgram) -> Run:
        """What runs a step of `executable`; its tensors are on the accelerator."""

    @abstractmethod
    def _captured(self, executable: Executable, step: Step) -> Any:
        """The graph of an open executable. Raises OutOfDeviceMemoryError, DeviceError."""

    def _watched(self, what: str) -> AbstractContextManager[None]:
        """Inside the block, the accelerator software's compilations count as `what`'s, if not counted otherwise."""
        del what
        return nullcontext()

    def _make_cache(self) -> AcceleratorCache:
        return AcceleratorCache(self.accelerator, self.bundle.cache_shape, self.capacity, dtype_of(self.bundle))

    @property
    def _runs_on(self) -> Any:
        return self.accelerator.device

    def _weight(self, name: str) -> Any:
        if name not in self._on_device:
            raise ValueError(f"weights.json has no entry for {name!r:.80}")
        return self._on_device[name]

    def require_cache(self) -> None:
        """Allocate the cache for the requested slots, if nobody sized it."""
        if not self._cache.tensors:
            with took(self.accelerator, "Initializing cache engine"):
                self.resize(self.slots)

    def _open_cache(self) -> AcceleratorCache:
        self.require_cache()
        return self._cache

    def resize(self, slots: int) -> None:
        """Allocate an empty cache of so many slots and compile its copies. Raises OutOfDeviceMemoryError."""
        with self._watched("the cache and its moves"):
            self._cache.make(slots)
            self._cache.warm()
        self.slots, self._held = slots, SlotLengths(slots, self.bundle.cache_shape.rewind)

    def _open(self, executable: Executable) -> OpenedProgram:
        opened = super()._open(executable)
        if executable.blob not in self._runs:
            self._runs[executable.blob] = self._run_of(executable, opened)
        return opened

    def open_all(self) -> None:
        super().open_all()
        self.require_cache()

    def capture(self, executable: Executable, step: Step) -> None:
        """Capture the graph of an executable, which `run` replays from then on. Slot 0 loses its content.

        Raises OutOfDeviceMemoryError, and DeviceError for what cannot be captured; the bucket then runs uncaptured.
        """
        self._open(executable)
        self.require_cache()
        with self._torch.inference_mode(), self._watched(f"the graph of {executable}"):
            self._graphs[executable.blob] = self._captured(executable, step)
        self._held.wrote(0, 0, 0)

    def memory(self) -> dict[str, int]:
        free, total = self.accelerator.memory()
        return {
            "cache": self._cache.nbytes,
            "weights": sum(tensor.numel() * tensor.element_size() for tensor in self._on_device.values()),
            "device_free": free,
            "device_total": total,
            "open_executables": len(self._programs),
            "graphs": len(self._graphs),
        }

    def close(self) -> None:
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._runs.clear()
        self._programs.clear()
        self._on_device.clear()
        self._cache.drop()
        self._weights.close()


class AcceleratorGraphs:
    """The accelerator as a graph-capturing device (buckets/capture/device.py). `kind` names its memory in logs."""

    graphs: ClassVar[str]
    kind: ClassVar[str]

    def __init__(self, executor: AcceleratorExecutor, accelerator: TorchAccelerator, cache: AcceleratorCache) -> None:
        self._executor, self._accelerator, self._cache = executor, accelerator, cache

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the plan's block_size tokens: its share of a slot, including states."""
        return -(-self._cache.slot_bytes * self._executor.bundle.plan.limits.block_size // self._executor.capacity)

    def total_memory(self) -> int:
        return self._accelerator.memory()[1]

    def free_memory(self) -> int:
        return self._accelerator.memory()[0]

    def expected(self, bucket: Bucket) -> int:
        """Unknown: the first graph of a phase is measured."""
        del bucket
        return 0

    def run(self, bucket: Bucket) -> None:
        self._cache.make(1)
        try:
            self._executor.run(step_of(bucket))
        finally:
            self._cache.drop()

    def allocate(self, blocks: int) -> None:
        slots = slots_in(blocks * self._executor.bundle.plan.limits.block_size, self._executor.capacity)
        _log.info("# %s blocks: %d, # CPU blocks: 0", self.kind, blocks)
        self._executor.resize(slots)

    def capture(self, bucket: Bucket) -> int:
        """Capture its graph; returns by how many bytes the free memory shrank."""
        before = self.free_memory()
        executable = self._executor.bundle.executable(bucket.phase, bucket.batch, bucket.query, bucket.context)
        self._executor.capture(executable, step_of(bucket))
        return before - self.free_memory()


def step_of(bucket: Bucket) -> Step:
    """A step of the bucket's shape, with one live row in slot 0."""
    return pad(bucket, [0], [[0] * bucket.query], [0])


@contextmanager
def took(accelerator: TorchAccelerator, what: str) -> Iterator[None]:
    """Log the memory that the block took, at INFO; negative values are memory that was released.

    It collects garbage first, which takes a second with millions of objects. It does nothing if INFO is disabled.
    """
    if not _log.isEnabledFor(logging.INFO):
        yield
        return
    gc.collect()
    (before, _), host_before = accelerator.memory(), available_memory()
    yield
    gc.collect()
    (after, total), host_after, host = accelerator.memory(), available_memory(), host_memory()
    line = took_line(what, before - after, total - after, total)
    if host is not None and host_before is not None and host_after is not None:
        line += f" and {size_text(host_before - host_after)} of host memory "
        line += f"({size_text(host - host_after)}/{size_text(host)} used)"
    _log.info("%s", line)
