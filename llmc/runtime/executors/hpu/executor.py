"""Portable programs on a Gaudi card, in the guide's four modes; on the CPU where this host has no card.

A step is one graph of fixed shapes (executors/whole_step). A host without habana_frameworks, or without a card,
replays the same programs on its CPU, as the executor "torch" does, and says so (`in_place_of`): their numbers are
proven there, and times mean nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.artifacts.bundle.native import RECIPES
from llmc.buckets.bucket import Bucket
from llmc.runtime import accelerators
from llmc.runtime.executors.base import ExecutorDescription
from llmc.runtime.executors.compilations import Monitor
from llmc.runtime.executors.hpu.habana import COMPILED, FELL_BACK, HpuCard, HpuGraph, is_installed, number, open_card
from llmc.runtime.executors.hpu.recipes import KV_BLOCKS, location, pinned_slots
from llmc.runtime.executors.torch.executor import OpenedProgram, TorchExecutor, warn_of_other_torch
from llmc.runtime.executors.whole_step.executor import CardExecutor, CardGraphs, step_of
from llmc.runtime.executors.whole_step.step_program import Run, flat_step, inputs, step_program
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.compilations import CompilationCounter
    from llmc.runtime.step import Step


_log = logging.getLogger("llmc")

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
        "mode": str(HpuMode.of(settings or Settings.from_environment())),
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


@dataclass(frozen=True)
class HpuMode:
    """How a Gaudi runs a step: the guide's table, by PT_HPU_LAZY_MODE and --enforce-eager.

        PT_HPU_LAZY_MODE   eager   mode
        0                  no      torch.compile, one graph a bucket, compiled by hpu_backend; today's default
        0                  yes     PyTorch eager mode
        1                  no      HPU graphs, captured under the memory budget; what is not captured runs lazily
        1                  yes     PyTorch lazy mode

    `lazy` is the bridge's mode; `eager`: nothing is compiled as a whole, or captured. Source: the Gaudi guide of vLLM,
    "Execution modes"; the default of 0 is vllm-gaudi's since 2025.
    """

    lazy: bool
    eager: bool

    @classmethod
    def of(cls, settings: Settings) -> HpuMode:
        """As the environment and the flags say."""
        return cls(settings.hpu_lazy_mode, settings.enforce_eager)

    @property
    def compiles(self) -> bool:
        """Whether torch.compile makes a graph of each bucket."""
        return not self.lazy and not self.eager

    @property
    def captures(self) -> bool:
        """Whether HPU graphs are captured."""
        return self.lazy and not self.eager

    def __str__(self) -> str:
        if self.compiles:
            return "torch.compile"
        if self.captures:
            return "HPU Graphs"
        return "PyTorch lazy mode" if self.lazy else "PyTorch eager mode"


class CompilationWatch:
    """Counts what the card compiles, by what made it do so: the bridge's counter `graph_compilation` around each step.

    A step after the start that compiled has met a shape that nothing warmed: it is named and counted, by the executor's
    counter, which the engine warns of. The guide's variables log more:

        VLLM_HPU_LOG_STEP_GRAPH_COMPILATION[_ALL]   the stats of each step that compiled [of each step]
        VLLM_HPU_LOG_STEP_CPU_FALLBACKS[_ALL]       of each step of which operators ran on the host [of each step]

    The lines are vLLM's: HabanaAI/vllm-fork, vllm/executor/habana_executor.py (2024).
    """

    def __init__(self, card: HpuCard, counter: CompilationCounter, settings: Settings) -> None:
        self._card, self._counter = card, counter
        self._compilations, self._fallbacks = settings.log_step_compilations, settings.log_step_fallbacks

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Count what is compiled inside as `what`'s."""
        with ExitStack() as stack:
            compiled = stack.enter_context(self._card.counting(COMPILED))
            fallbacks = stack.enter_context(self._card.counting(FELL_BACK)) if self._fallbacks != "none" else None
            yield
        for _ in range(number(stats := compiled())):
            self._counter.opened(f"hpu: {what}")
        if self._compilations == "all" or (self._compilations == "some" and number(stats)):
            _log.warning("VLLM_HPU_STEP_GRAPH_COMPILATION: %s, %s", stats, what)
        if fallbacks is not None and (self._fallbacks == "all" or number(fallbacks())):
            _log.warning("VLLM_HPU_STEP_CPU_FALLBACK: %s, %s", fallbacks(), what)


class GraphCompilations(Monitor):
    """The bridge's global counter: every graph that its compiler compiled in this process, whoever asked for it."""

    name = "hpu.metrics graph_compilation"

    def __init__(self, card: HpuCard) -> None:
        self._card = card
        self._first = card.compilations()

    def what(self) -> Sequence[str]:
        """The bridge counts, and does not name them."""
        return ("a graph",) * (self._card.compilations() - self._first)


class HpuExecutor(TorchExecutor):
    """The CPU in the place of a card, or, where this host has one, `HpuOnCard`."""

    description: ClassVar[ExecutorDescription] = replace(
        TorchExecutor.description, opens={**TorchExecutor.description.opens, RECIPES: "code"}, host=host
    )

    _stands_for: ClassVar[str] = "Gaudi"

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """As torch's executor on a CPU; on a Gaudi host the bridge decides which torch there is."""
        if is_installed():
            warn_of_other_torch(bundle, "Gaudi host")
        else:
            super().check(bundle)

    def __new__(cls, bundle: Bundle, *_: object) -> HpuExecutor:
        """What is opened as a portable half runs on the CPU, whatever is here."""
        mode, card = HpuMode.of(bundle.settings), None
        if not bundle.settings.open_portable and is_installed():
            location(bundle, str(mode))  # before the bridge is imported
            card = open_card(mode.lazy)
        built: HpuExecutor = object.__new__(HpuExecutor if card is None else HpuOnCard)
        if isinstance(built, HpuOnCard):
            built.card, built.mode = card, mode  # type: ignore[assignment] # there is one
        return built


class HpuOnCard(CardExecutor, HpuExecutor):
    """The card."""

    _stands_for: ClassVar[str] = ""
    card: HpuCard
    mode: HpuMode
    _graph_device: ClassVar[type[CardGraphs]] = HpuGraphs
    _graphs: dict[str, HpuGraph]

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        self._compile_events = GraphCompilations(self.card)
        super().__init__(bundle, pinned_slots(bundle, capacity) or slots, capacity, threads)
        self._watch = CompilationWatch(self.card, self.compilations, bundle.settings)
        self.compilations.monitors.append(self._compile_events)

    def _watched(self, what: str) -> AbstractContextManager[None]:
        return self._watch.step(what)

    def _run_of(self, executable: Executable, opened: OpenedProgram) -> Run:
        """In torch.compile mode compiled: without running, where the bridge can."""
        flat = flat_step(opened.program, executable.context or 0, self._cache.arrays)
        run = step_program(flat, opened.weights, self._cache)
        if self.mode.compiles:
            self.require_cache()
            run = self.card.compiled(run)
            bucket = Bucket(executable.phase, executable.batch or 1, executable.query or 1, executable.context or 0)  # type: ignore[arg-type]
            with self._watch.step(str(executable)), self._torch.inference_mode(), self.card.guarded():
                given = self._put(step_of(bucket))
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

    def _replay(self, step: Step, opened: OpenedProgram) -> list[Any]:
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

    def _captured(self, executable: Executable, step: Step) -> HpuGraph:
        return self.card.capture(self._runs[executable.blob], self._put(step))

    def _put(self, step: Step) -> list[Any]:
        given = [self.card.put(tensor) for tensor in inputs(step, self._cache.lengths)]
        self.card.mark_step()
        return given

    def close(self) -> None:
        """Give back what the card holds; recipes that were compiled meanwhile are on disk then."""
        self.card.flush_recipes()
        super().close()
