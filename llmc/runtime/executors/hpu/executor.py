"""Portable programs on a Gaudi card, in the guide's four modes; on the CPU where this host has no card.

A step is one graph of fixed shapes (executors/whole_step). A host without habana_frameworks, or without a card,
replays the same programs on its CPU, as the executor "torch" does, and says so (`in_place_of`): their numbers are
proven there, and times mean nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.artifacts.bundle.native import RECIPES
from llmc.runtime import accelerators
from llmc.runtime.executors.base import Content
from llmc.runtime.executors.hpu.habana import Card, Graph, is_installed, open_card
from llmc.runtime.executors.hpu.modes import Mode
from llmc.runtime.executors.hpu.recipes import KV_BLOCKS, pinned_slots, place
from llmc.runtime.executors.hpu.watch import CompilationWatch, GraphCompilations
from llmc.runtime.executors.torch.executor import Opened, TorchExecutor, release, torch_releases
from llmc.runtime.executors.whole_step.executor import CardExecutor
from llmc.runtime.executors.whole_step.graphs import CardGraphs
from llmc.runtime.executors.whole_step.step_program import Run, flat_step, inputs, step_program
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.witness import Witness
    from llmc.runtime.step import Step


PLUGIN = "habana-torch-plugin"
_TYPES = ("sys/class/accel/accel*/device/device_type", "sys/class/habanalabs/hl*/device_type")
_DRIVER = "sys/module/habanalabs/version"


def host(settings: Settings | None = None) -> Mapping[str, str]:
    """What recipes are tied to, without opening the card: card, driver, Synapse and mode by name; empty on a host
    without a Gaudi card or without its software.

    The card's code name is in sysfs (torvalds/linux, Documentation/ABI/testing/sysfs-driver-habanalabs: device_type,
    below /sys/class/accel/accel<n>/device since 6.3, before below /sys/class/habanalabs/hl<n>), the driver's version is
    that of its kernel module, and Synapse's is that of the Python plug-in, which is released with it. Recipes of one
    mode are of no use in another: lazy graphs are cut elsewhere than compiled ones.
    """
    cards = sorted({text for pattern in _TYPES for path in accelerators.ROOT.glob(pattern) if (text := _text(path))})
    try:
        synapse = version(PLUGIN)
    except PackageNotFoundError:
        return {}
    if not cards:
        return {}
    return {
        "card": " ".join(cards),
        "driver": _text(accelerators.ROOT / _DRIVER) or "unknown",
        "synapse": synapse,
        "mode": str(Mode.of(settings or Settings.from_environment())),
    }


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


class HpuGraphs(CardGraphs):
    """With as many blocks as the bundle pins, where it does."""

    graphs: ClassVar[str] = "HPUGraphs"
    kind: ClassVar[str] = "HPU"

    def allocate(self, blocks: int) -> None:
        """The blocks that the bundle pins, or these."""
        super().allocate(self._executor.bundle.option(KV_BLOCKS, 0) or blocks)


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


class OnCard(CardExecutor, HpuExecutor):
    """The card."""

    card: Card
    mode: Mode
    _graphs: dict[str, Graph]

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        self._compile_events = GraphCompilations(self.card)
        super().__init__(bundle, pinned_slots(bundle, capacity) or slots, capacity, threads)
        self._watch = CompilationWatch(self.card, self.compilations, bundle.settings)
        self._graph_device = HpuGraphs(self, self.card, self._cache) if self.mode.captures else None

    def _watched(self, what: str) -> AbstractContextManager[None]:
        return self._watch.step(what)

    def witnesses(self) -> Sequence[Witness]:
        """And the bridge's own counter of compiled graphs."""
        return (*super().witnesses(), self._compile_events)

    def _run_of(self, executable: Executable, opened: Opened) -> Run:
        """In torch.compile mode compiled: without running, where the bridge can."""
        flat = flat_step(opened.program, executable.context or 0, self._cache.arrays)
        run = step_program(flat, opened.weights, self._cache)
        if self.mode.compiles:
            self.require_cache()
            run = self.card.compiled(run)
            with self._watch.step(str(executable)), self._torch.inference_mode(), self.card.guarded():
                given = self._put(_example(executable))
                with self.card.compile_only() as only:
                    if only:
                        run(*given)
        return run

    def open_all(self) -> None:
        """Every executable, and the cache; a warning where the bundle's recipes were of no use."""
        super().open_all()
        if RECIPES in self.bundle.manifest.files and (compiled := self._compile_events.count()):
            _log.warning(
                "%s: %d graphs were compiled at this start, though the bundle has recipes: they are of no use here, or "
                "the Gaudi software does not read them; finish it again: llmc compile --resume -o %s",
                self.bundle.path, compiled, self.bundle.path,
            )  # fmt: skip

    def _replay(self, step: Step, opened: Opened) -> list[Any]:
        del opened  # with its cache and in its mode, see _run_of
        if not step.slots:
            return [self._torch.zeros((step.batch, self._vocabulary))]
        self.require_cache()
        executable = self._executable(step)
        with self._watched(str(executable)), self.card.guarded():
            graph = self._graphs.get(executable.blob)
            if graph is None:
                found = self._runs[executable.blob](*self._put(step))
            else:
                found = graph.replay(inputs(step, self._cache.lengths))
            self.card.mark_step()
            host = [tensor.cpu() for tensor in found]
        self._require_logits(host[0].shape[-1])
        return host

    def _captured(self, executable: Executable, step: Step) -> Graph:
        return self.card.capture(self._runs[executable.blob], self._put(step))

    def _put(self, step: Step) -> list[Any]:
        given = [self.card.put(tensor) for tensor in inputs(step, self._cache.lengths)]
        self.card.mark_step()
        return given

    def close(self) -> None:
        """Give back what the card holds; recipes that were compiled meanwhile are on disk then."""
        self.card.flush_recipes()
        super().close()


def _example(executable: Executable) -> Step:
    """A step of the executable's shape."""
    from llmc.buckets.bucket import Bucket
    from llmc.runtime.step import pad

    phase, query = executable.phase, executable.query or 1
    bucket = Bucket(phase, executable.batch or 1, query, executable.context or 0)  # type: ignore[arg-type]
    return pad(bucket, [0], [[0] * query], [0])
