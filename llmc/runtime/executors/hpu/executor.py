"""Portable programs on a Gaudi accelerator in the Gaudi guide's four modes, or on the CPU of a host without one.

A step is one graph of fixed shapes (executors/whole_step).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.artifacts.bundle.trust import RECIPES
from llmc.buckets.bucket import Bucket
from llmc.runtime import accelerators
from llmc.runtime.executors.base import ExecutorDescription
from llmc.runtime.executors.compilations import Monitor
from llmc.runtime.executors.hpu.habana import (
    COMPILED,
    FELL_BACK,
    HpuAccelerator,
    HpuGraph,
    is_installed,
    number,
    open_accelerator,
)
from llmc.runtime.executors.hpu.recipes import KV_BLOCKS, pinned_slots, put_recipes
from llmc.runtime.executors.torch.executor import OpenedProgram, TorchExecutor, warn_of_other_torch
from llmc.runtime.executors.whole_step.executor import AcceleratorExecutor, AcceleratorGraphs, step_of
from llmc.runtime.executors.whole_step.step import Run, flat_step, inputs, step_program
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.compilations import CompilationCounter
    from llmc.runtime.step import Step


_log = logging.getLogger("llmc")

PLUGIN = "habana-torch-plugin"
_TYPES = ("sys/class/accel/accel*/device/device_type", "sys/class/habanalabs/hl*/device_type")
_DRIVER = "sys/module/habanalabs/version"


def host(settings: Settings | None = None) -> Mapping[str, str]:
    """The facts that recipes depend on: accelerator, driver, Synapse and mode. Empty without a Gaudi or its software.

    The code name is in sysfs (torvalds/linux, Documentation/ABI/testing/sysfs-driver-habanalabs: device_type, below
    /sys/class/accel/accel<n>/device since 6.3, before below /sys/class/habanalabs/hl<n>), Synapse's version that of the
    Python plug-in. Lazy graphs are cut differently, so recipes depend on the mode.
    """
    kinds = sorted({text for pattern in _TYPES for path in accelerators.ROOT.glob(pattern) if (text := _text(path))})
    try:
        synapse = version(PLUGIN)
    except PackageNotFoundError:
        return {}
    if not kinds:
        return {}
    return {
        "accelerator": " ".join(kinds),
        "driver": _text(accelerators.ROOT / _DRIVER) or "unknown",
        "synapse": synapse,
        "mode": str(HpuMode.of(settings or Settings.from_environment())),
    }


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


class HpuGraphs(AcceleratorGraphs):
    """Graph device that respects the number of blocks that the bundle pins."""

    graphs: ClassVar[str] = "HPUGraphs"
    kind: ClassVar[str] = "HPU"

    def allocate(self, blocks: int) -> None:
        super().allocate(self._executor.bundle.option(KV_BLOCKS, 0) or blocks)


@dataclass(frozen=True)
class HpuMode:
    """How a Gaudi runs a step, by PT_HPU_LAZY_MODE and --enforce-eager.

        PT_HPU_LAZY_MODE   eager   mode
        0                  no      torch.compile, one graph per bucket, compiled by hpu_backend; today's default
        0                  yes     PyTorch eager mode
        1                  no      HPU graphs, captured under the memory budget; what is not captured runs lazily
        1                  yes     PyTorch lazy mode

    `lazy` is the bridge's mode; `eager`: nothing is compiled as a whole, or captured. Source: vLLM's Gaudi guide,
    "Execution modes"; the default of 0 is vllm-gaudi's since 2025.
    """

    lazy: bool
    eager: bool

    @classmethod
    def of(cls, settings: Settings) -> HpuMode:
        return cls(settings.hpu_lazy_mode, settings.enforce_eager)

    @property
    def compiles(self) -> bool:
        return not self.lazy and not self.eager

    @property
    def captures(self) -> bool:
        return self.lazy and not self.eager

    def __str__(self) -> str:
        if self.compiles:
            return "torch.compile"
        if self.captures:
            return "HPU Graphs"
        return "PyTorch lazy mode" if self.lazy else "PyTorch eager mode"


class CompilationWatch:
    """Counts the accelerator's compilations by cause, with the bridge's counter `graph_compilation` around each step.

    A compilation after the start means a shape that was not warmed up: it is named and counted in the executor's
    counter, of which the engine warns. The guide's variables log more:

        VLLM_HPU_LOG_STEP_GRAPH_COMPILATION[_ALL]   the stats of each step that compiled [of each step]
        VLLM_HPU_LOG_STEP_CPU_FALLBACKS[_ALL]       of each step with operators that ran on the host [of each step]

    The log lines are vLLM's: HabanaAI/vllm-fork, vllm/executor/habana_executor.py (2024).
    """

    def __init__(self, accelerator: HpuAccelerator, counter: CompilationCounter, settings: Settings) -> None:
        self._accelerator, self._counter = accelerator, counter
        self._compilations, self._fallbacks = settings.log_step_compilations, settings.log_step_fallbacks

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Attribute compilations inside the block to `what`."""
        with ExitStack() as stack:
            compiled = stack.enter_context(self._accelerator.counting(COMPILED))
            fallbacks = (
                stack.enter_context(self._accelerator.counting(FELL_BACK)) if self._fallbacks != "none" else None
            )
            yield
        for _ in range(number(stats := compiled())):
            self._counter.opened(f"hpu: {what}")
        if self._compilations == "all" or (self._compilations == "some" and number(stats)):
            _log.warning("VLLM_HPU_STEP_GRAPH_COMPILATION: %s, %s", stats, what)
        if fallbacks is not None and (self._fallbacks == "all" or number(fallbacks())):
            _log.warning("VLLM_HPU_STEP_CPU_FALLBACK: %s, %s", fallbacks(), what)


class GraphCompilations(Monitor):
    """The bridge's global counter: every graph compiled in this process, whatever caused it."""

    name = "hpu.metrics graph_compilation"

    def __init__(self, accelerator: HpuAccelerator) -> None:
        self._accelerator = accelerator
        self._first = accelerator.compilations()

    def what(self) -> Sequence[str]:
        """One generic name per graph, because the bridge counts graphs without naming them."""
        return ("a graph",) * (self._accelerator.compilations() - self._first)


class HpuExecutor(TorchExecutor):
    """Runs on the CPU; on a host with a Gaudi the constructor returns `HpuOnDevice` instead."""

    description: ClassVar[ExecutorDescription] = replace(
        TorchExecutor.description, opens={**TorchExecutor.description.opens, RECIPES: "code"}, host=host
    )

    _stands_for: ClassVar[str] = "Gaudi"

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """On a Gaudi host the bridge determines the torch release."""
        if is_installed():
            warn_of_other_torch(bundle, "Gaudi host")
        else:
            super().check(bundle)

    def __new__(cls, bundle: Bundle, *_: object) -> HpuExecutor:
        mode, accelerator = HpuMode.of(bundle.settings), None
        if not bundle.settings.open_portable and is_installed():
            put_recipes(bundle, str(mode))  # before the bridge is imported
            accelerator = open_accelerator(mode.lazy)
        built: HpuExecutor = object.__new__(HpuExecutor if accelerator is None else HpuOnDevice)
        if isinstance(built, HpuOnDevice):
            built.accelerator, built.mode = accelerator, mode  # type: ignore[assignment] # there is one
        return built


class HpuOnDevice(AcceleratorExecutor, HpuExecutor):
    """Runs on the Gaudi."""

    _stands_for: ClassVar[str] = ""
    accelerator: HpuAccelerator
    mode: HpuMode
    _graph_device: ClassVar[type[AcceleratorGraphs]] = HpuGraphs
    _graphs: dict[str, HpuGraph]

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        self._compile_events = GraphCompilations(self.accelerator)
        super().__init__(bundle, pinned_slots(bundle, capacity) or slots, capacity, threads)
        self._watch = CompilationWatch(self.accelerator, self.compilations, bundle.settings)
        self.compilations.monitors.append(self._compile_events)

    def _watched(self, what: str) -> AbstractContextManager[None]:
        return self._watch.step(what)

    def _run_of(self, executable: Executable, opened: OpenedProgram) -> Run:
        """In torch.compile mode, compile; without running if the bridge can."""
        flat = flat_step(opened.program, executable.context or 0, self._cache.arrays)
        run = step_program(flat, opened.weights, self._cache)
        if self.mode.compiles:
            self.require_cache()
            run = self.accelerator.compiled(run)
            bucket = Bucket(executable.phase, executable.batch or 1, executable.query or 1, executable.context or 0)  # type: ignore[arg-type]
            with self._watch.step(str(executable)), self._torch.inference_mode(), self.accelerator.guarded():
                given = self._put(step_of(bucket))
                with self.accelerator.compile_only() as only:
                    if only:
                        run(*given)
        return run

    def open_all(self) -> None:
        super().open_all()
        if RECIPES in self.bundle.manifest.files and (compiled := self._compile_events.count()):
            _log.warning(
                "%s: %d graphs were compiled at this start although the bundle has recipes: they do not fit here, or "
                "the Gaudi software does not read them; compile it again: llmc compile --resume -o %s",
                self.bundle.path, compiled, self.bundle.path,
            )  # fmt: skip

    def _replay(self, step: Step, opened: OpenedProgram) -> list[Any]:
        del opened  # with its cache and in its mode, see _run_of
        if not step.slots:
            return [self._torch.zeros((step.batch, self._vocabulary))]
        self.require_cache()
        executable = self._executable(step)
        with self._watched(str(executable)), self.accelerator.guarded():
            graph = self._graphs.get(executable.blob)
            if graph is None:
                found = self._runs[executable.blob](*self._put(step))
            else:
                found = graph.replay(inputs(step, self._cache.lengths))
            self.accelerator.mark_step()
            host = [tensor.cpu() for tensor in found]
        self._require_logits(host[0].shape[-1])
        return host

    def _captured(self, executable: Executable, step: Step) -> HpuGraph:
        return self.accelerator.capture(self._runs[executable.blob], self._put(step))

    def _put(self, step: Step) -> list[Any]:
        given = [self.accelerator.put(tensor) for tensor in inputs(step, self._cache.lengths)]
        self.accelerator.mark_step()
        return given

    def close(self) -> None:
        """After recipes compiled meanwhile were written to disk."""
        self.accelerator.flush_recipes()
        super().close()
