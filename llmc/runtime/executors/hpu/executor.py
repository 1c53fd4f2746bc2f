"""Portable programs on a Gaudi card, in the guide's four modes; on the CPU where this host has no card.

Weights are copied to the card once; the KV cache lives there, and a step is one graph of fixed shapes
(step_program.py). A host without habana_frameworks, or without a card, replays the same programs on its CPU, as the
executor "torch" does, and says so (`in_place_of`): their numbers are proven there, and times mean nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from llmc.artifacts.bundle.native import RECIPES
from llmc.runtime.executors.base import Content, require_held
from llmc.runtime.executors.hpu.cache import CardCache
from llmc.runtime.executors.hpu.graphs import HpuGraphs
from llmc.runtime.executors.hpu.habana import Card, Graph, is_installed, open_card
from llmc.runtime.executors.hpu.host import host
from llmc.runtime.executors.hpu.memory_log import took
from llmc.runtime.executors.hpu.modes import Mode
from llmc.runtime.executors.hpu.recipes import pinned_slots, place
from llmc.runtime.executors.hpu.step_program import Run, inputs, step_program
from llmc.runtime.executors.hpu.watch import CompilationWatch, GraphCompilations
from llmc.runtime.executors.torch.executor import Array, Opened, TorchExecutor, release, torch_releases

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.buckets.warmup.device import GraphDevice
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.witness import Witness
    from llmc.runtime.step import Step

_log = logging.getLogger("llmc")


class HpuExecutor(TorchExecutor):
    """Opens as what this host has: `OnCard` or `OnCpu`."""

    name: ClassVar[str] = "hpu"
    opens: ClassVar[Mapping[str, Content]] = {**TorchExecutor.opens, RECIPES: "code"}

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """As torch's executor on a CPU. The bridge decides which torch a Gaudi host has, so another release than the
        bundle's is no error there: programs are checked operator by operator, and `llmc verify` proves their numbers.
        """
        if not is_installed():
            super().check(bundle)
            return
        made_with, here = torch_releases(bundle)
        if release(made_with) != release(here):
            _log.warning(
                "%s: compiled with torch %s, this Gaudi host has %s: `llmc verify` says whether its numbers hold here",
                bundle.path, made_with or "of an unknown version", here,
            )  # fmt: skip

    @classmethod
    def host(cls) -> Mapping[str, str]:
        """Card, driver, Synapse and mode, see host.py."""
        return host()

    def __new__(cls, bundle: Bundle, *_: object) -> HpuExecutor:
        """One of the two. What is opened as a portable half runs on the CPU, whatever is here."""
        mode, card = Mode.of(bundle.settings), None
        if not bundle.settings.open_portable and is_installed():
            place(bundle, str(mode))  # before the bridge is imported
            card = open_card(mode.lazy)
        made: HpuExecutor = object.__new__(OnCpu if card is None else OnCard)
        if isinstance(made, OnCard):
            made.card, made.mode = card, mode  # type: ignore[assignment] # there is one
        return made


class OnCpu(HpuExecutor):
    """The CPU in the place of a card."""

    @property
    def in_place_of(self) -> str:
        """A Gaudi card."""
        return "Gaudi"


class OnCard(HpuExecutor):
    """The card."""

    card: Card
    mode: Mode

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        self._compile_events = GraphCompilations(self.card)
        self._on_card: dict[str, Any] = {}
        self._runs: dict[str, Run] = {}
        super().__init__(bundle, pinned_slots(bundle, capacity) or slots, capacity, threads)
        self._graphs: dict[str, Graph] = {}
        self._watch = CompilationWatch(self.card, self.compilations, bundle.settings)
        _log.info("%s: %s on %s", bundle.path, self.mode, self.card.name)
        with took(self.card, f"Pre-loading model weights on {self.card.device}"):
            for name in self._weights.names():
                self._on_card[name] = self.card.put(self._weights.tensor(name))
        self._graph_device = HpuGraphs(self, self.card, self._cache) if self.mode.captures else None

    def _make_cache(self) -> CardCache:
        """Empty: it is made when memory was divided, or before the first step."""
        return CardCache(self.card, (self._tensors, self._heads, self._head_dim), self.capacity, self._dtype)

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

    def graph_device(self) -> GraphDevice | None:
        """The card, where HPU graphs are captured."""
        return self._graph_device

    def witnesses(self) -> Sequence[Witness]:
        """And the bridge's own counter of compiled graphs."""
        return (*super().witnesses(), self._compile_events)

    def require_cache(self) -> None:
        """Make the cache for the slots that were asked for, where nobody sized it."""
        if self._cache.tensor is None:
            with took(self.card, "Initializing cache engine"):
                self.resize(self.slots)

    def resize(self, slots: int) -> None:
        """An empty cache of so many slots; moves within it are compiled now. Raises OutOfDeviceMemoryError."""
        with self._watch.step("the cache and its moves"):
            self._cache.make(slots)
            self._cache.copy(0, 0)
            self._cache.write(0, self._cache.read(0))
        self.slots, self._used = slots, [0] * slots

    def _open(self, executable: Executable) -> Opened:
        """Parsed, and in torch.compile mode compiled: without running, where the bridge can."""
        opened = super()._open(executable)
        if executable.blob in self._runs:
            return opened
        run = step_program(opened.program, opened.weights, self._cache, executable.context or 0)
        if self.mode.compiles:
            self.require_cache()
            run = self.card.compiled(run)
            with self._watch.step(str(executable)), self._torch.inference_mode(), self.card.guarded():
                given = self._put(_example(executable))
                with self.card.compile_only() as only:
                    if only:
                        run(*given)
        self._runs[executable.blob] = run
        return opened

    def open_all(self) -> None:
        """Every executable, and the cache."""
        super().open_all()
        self.require_cache()
        if RECIPES in self.bundle.manifest.files and (compiled := self._compile_events.count()):
            _log.warning(
                "%s: %d graphs were compiled at this start, though the bundle has recipes: they are of no use here, or "
                "the Gaudi software does not read them; finish it again: llmc compile --resume -o %s",
                self.bundle.path, compiled, self.bundle.path,
            )  # fmt: skip

    def _replay(self, step: Step, opened: Opened) -> list[Any]:
        del opened  # with its cache and in its mode, see _open
        if not step.slots:
            return [self._torch.zeros((step.batch, self._vocabulary))]
        self.require_cache()
        executable = self._executable(step)
        with self._watch.step(str(executable)), self.card.guarded():
            graph = self._graphs.get(executable.blob)
            if graph is None:
                found = self._runs[executable.blob](*self._put(step))
            else:
                found = graph.replay(inputs(step, self.capacity))
            self.card.mark_step()
            host = [tensor.cpu() for tensor in found]
        self._require_logits(host[0].shape[-1])
        return host

    def _put(self, step: Step) -> list[Any]:
        given = [self.card.put(tensor) for tensor in inputs(step, self.capacity)]
        self.card.mark_step()
        return given

    def capture(self, executable: Executable, step: Step) -> None:
        """Capture the graph of an executable, which `run` replays from then on; slot 0 loses what it held.

        Raises OutOfDeviceMemoryError; the bucket runs uncaptured then.
        """
        self._open(executable)
        self.require_cache()
        with self._torch.inference_mode(), self._watch.step(f"the HPU graph of {executable}"):
            graph = self.card.capture(self._runs[executable.blob], self._put(step))
        self._graphs[executable.blob] = graph
        self._used[0] = 0

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy a slot, on the card."""
        require_held(self._used, source, length)
        self.require_cache()
        if source != target and length:
            self._cache.copy(source, target)
        self._used[target] = length

    def export_prefix(self, slot: int, length: int) -> list[Array]:
        """A slot, brought to the host."""
        require_held(self._used, slot, length)
        self.require_cache()
        row = self._cache.read(slot)[:, :length].transpose(1, 2)
        return [np.array(tensor.float().numpy()) for tensor in row]

    def import_prefix(self, slot: int, prefix: list[Array]) -> None:
        """A slot, put on the card; zeros behind the prefix."""
        length = self._check_prefix(prefix, self._tensors)
        self.require_cache()
        row = self._torch.zeros((self._tensors, self.capacity, self._heads, self._head_dim))
        row[:, :length] = self._torch.from_numpy(np.stack(prefix)).transpose(1, 2)
        self._cache.write(slot, row)
        self._used[slot] = length

    def poison(self, slot: int, start: int, value: float) -> None:
        """Overwrite what no live token owns."""
        self.require_cache()
        row = self._cache.read(slot)
        row[:, start:] = value
        self._cache.write(slot, row)

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
        """Give back what the card holds; recipes that were compiled meanwhile are on disk then."""
        self.card.flush_recipes()
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._runs.clear()
        self._programs.clear()
        self._on_card.clear()
        self._cache.drop()
        self._weights.close()


def _example(executable: Executable) -> Step:
    """A step of the executable's shape."""
    from llmc.buckets.bucket import Bucket
    from llmc.runtime.step import pad

    phase, query = executable.phase, executable.query or 1
    bucket = Bucket(phase, executable.batch or 1, query, executable.context or 0)  # type: ignore[arg-type]
    return pad(bucket, [0], [[0] * query], [0])
