"""Executors whose steps are graphs of fixed shapes on a card, from the cache to the cache (step_program.py).

Weights are copied to the card once; the cache lives there (cache.py). A subclass says what runs a step, how inputs
and outputs get there and back (`_replay`), and how graphs are captured.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from llmc.runtime.executors.held import Held
from llmc.runtime.executors.torch.executor import Array, Opened, TorchExecutor
from llmc.runtime.executors.whole_step.cache import CardCache
from llmc.runtime.executors.whole_step.layout import dtype_of
from llmc.runtime.executors.whole_step.memory_log import took
from llmc.runtime.executors.whole_step.step_program import Run

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.buckets.capture.device import GraphDevice
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.whole_step.card import Card, Graph, Mode
    from llmc.runtime.step import Step

_log = logging.getLogger("llmc")


class CardExecutor(TorchExecutor):
    """See the module's docstring. `card` and `mode` are there before `__init__`."""

    card: Card
    mode: Mode
    _cache: CardCache
    _graphs: dict[str, Any]
    """Captured graphs by executable; what they are is the subclass's, a card.Graph at least."""
    _graph_device: GraphDevice | None
    """The subclass's, which makes it where its mode captures graphs."""

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        self._on_card: dict[str, Any] = {}
        self._runs: dict[str, Run] = {}
        self._graphs = {}
        super().__init__(bundle, slots, capacity, threads)
        _log.info("%s: %s on %s", bundle.path, self.mode, self.card.name)
        with took(self.card, f"Pre-loading model weights on {self.card.device}"), self._torch.inference_mode():
            for name in self._weights.names():
                self._on_card[name] = self.card.put(self._weights.tensor(name))

    @abstractmethod
    def _run_of(self, executable: Executable, opened: Opened) -> Run:
        """What runs a step of `executable`; its tensors are on the card."""

    @abstractmethod
    def _captured(self, executable: Executable, step: Step) -> Graph:
        """The graph of an executable that is open. Raises OutOfDeviceMemoryError, DeviceError."""

    def graph_device(self) -> GraphDevice | None:
        """The card, where its graphs are captured."""
        return self._graph_device

    def _watched(self, what: str) -> AbstractContextManager[None]:
        """Inside, what the card's software compiles is counted as `what`'s, where it counts itself."""
        del what
        return nullcontext()

    def _make_cache(self) -> CardCache:
        """Empty: it is made when memory was divided, or before the first step."""
        return CardCache(self.card, self.bundle.cache_shape, self.capacity, dtype_of(self.bundle))

    @property
    def _runs_on(self) -> Any:
        return self.card.device

    def _weight(self, name: str) -> Any:
        if name not in self._on_card:
            raise ValueError(f"weights.json does not place {name!r:.80}")
        return self._on_card[name]

    @property
    def eager(self) -> bool:
        """As the mode says."""
        return self.mode.eager

    def require_cache(self) -> None:
        """Make the cache for the slots that were asked for, where nobody sized it."""
        if not self._cache.tensors:
            with took(self.card, "Initializing cache engine"):
                self.resize(self.slots)

    def resize(self, slots: int) -> None:
        """An empty cache of so many slots; moves within it are compiled now. Raises OutOfDeviceMemoryError."""
        with self._watched("the cache and its moves"):
            self._cache.make(slots)
            self._cache.warm()
        self.slots, self._held = slots, Held(slots, self.bundle.cache_shape.rewind)

    def _open(self, executable: Executable) -> Opened:
        """And what runs it."""
        opened = super()._open(executable)
        if executable.blob not in self._runs:
            self._runs[executable.blob] = self._run_of(executable, opened)
        return opened

    def open_all(self) -> None:
        """Every executable, and the cache."""
        super().open_all()
        self.require_cache()

    def capture(self, executable: Executable, step: Step) -> None:
        """Capture the graph of an executable, which `run` replays from then on; slot 0 loses what it held.

        Raises OutOfDeviceMemoryError, and DeviceError for what cannot be captured; the bucket runs uncaptured then.
        """
        self._open(executable)
        self.require_cache()
        with self._torch.inference_mode(), self._watched(f"the graph of {executable}"):
            self._graphs[executable.blob] = self._captured(executable, step)
        self._held.wrote(0, 0, 0)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy a slot, on the card."""
        self.require_cache()
        super().copy_prefix(source, target, length)

    def export_prefix(self, slot: int, length: int) -> list[Array]:
        """A slot, brought to the host."""
        self.require_cache()
        return super().export_prefix(slot, length)

    def import_prefix(self, slot: int, prefix: list[Array]) -> None:
        """A slot, put on the card; zeros behind the prefix."""
        self.require_cache()
        super().import_prefix(slot, prefix)

    def poison(self, slot: int, start: int, value: float) -> None:
        """Overwrite what no live token owns."""
        self.require_cache()
        super().poison(slot, start, value)

    def memory(self) -> dict[str, int]:
        """Bytes on the card: cache, weights, what is free; and how many programs are open and graphs captured."""
        free, total = self.card.memory()
        return {
            "cache": self._cache.nbytes,
            "weights": sum(tensor.numel() * tensor.element_size() for tensor in self._on_card.values()),
            "device_free": free,
            "device_total": total,
            "open_executables": len(self._programs),
            "graphs": len(self._graphs),
        }

    def close(self) -> None:
        """Give back what the card holds."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._runs.clear()
        self._programs.clear()
        self._on_card.clear()
        self._cache.drop()
        self._weights.close()
