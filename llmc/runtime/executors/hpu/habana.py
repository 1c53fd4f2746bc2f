"""The only module that uses the Gaudi SDK (`habana_frameworks.torch`).

Names and behaviour: HabanaAI/gaudi-pytorch-bridge, python_packages/habana_frameworks/torch (hpu/graphs.py at 39403e4,
hpu/memory.py, hpu/metrics/metrics.py, utils/internal.py, dynamo/compile_backend/backends.py), and vllm-project/
vllm-gaudi, vllm_gaudi/v1/worker/hpu_model_runner.py, for PT_COMPILE_ONLY_MODE. Importing the bridge reads
PT_HPU_LAZY_MODE, once per process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from llmc.errors import DeviceError, OutOfDeviceMemoryError
from llmc.runtime.executors.whole_step.step import TorchAccelerator, whole_graph

_log = logging.getLogger("llmc")

PACKAGE = "habana_frameworks"
LAZY = "PT_HPU_LAZY_MODE"
COMPILE_ONLY = "PT_COMPILE_ONLY_MODE"
COMPILED, FELL_BACK = "graph_compilation", "cpu_fallback"
"""Bridge metrics: compiled graphs, and operators that ran on the host instead."""

_OUT_OF_MEMORY = ("PT_DEVMEM", "Allocation failed", "out of memory", "Out of memory", "synOutOfDeviceMemory")
"""Texts in the bridge's errors that mean out of memory."""

Stats = Sequence[tuple[str, float]]


def is_installed() -> bool:
    """Whether this host has the SDK. Imports nothing of it."""
    return find_spec(PACKAGE) is not None


def open_accelerator(lazy: bool) -> HpuAccelerator | None:
    """Open this process's accelerator, in lazy mode or not; None without the SDK or a Gaudi.

    Raises DeviceError if the SDK does not fit this torch or its driver, or if the process already uses the other mode.
    """
    if not is_installed():
        return None
    os.environ[LAZY] = str(int(lazy))  # read at import
    try:
        import habana_frameworks.torch as bridge
        from habana_frameworks.torch.utils.internal import is_lazy
    except (ImportError, OSError, AssertionError, RuntimeError) as e:
        raise DeviceError(
            f"{PACKAGE}.torch cannot be used here: {e}; install the release of the Gaudi software that fits this torch"
        ) from e
    if bool(is_lazy()) != lazy:
        raise DeviceError(
            f"this process already uses Gaudi with {LAZY}={int(is_lazy())}, which cannot change; start another one"
        )
    if not bridge.hpu.is_available():
        return None
    try:
        return HpuAccelerator(bridge, lazy)
    except RuntimeError as e:
        raise DeviceError(
            f"the Gaudi cannot be opened: {e}; see `hl-smi` for its driver, and whether another process holds it"
        ) from e


class HpuAccelerator(TorchAccelerator):
    """An acquired accelerator. `device` is torch's name of it. Raises RuntimeError if acquiring fails."""

    def __init__(self, bridge: Any, lazy: bool) -> None:
        import torch

        self._bridge, self.lazy = bridge, lazy
        self.device = torch.device("hpu", bridge.hpu.current_device())
        self.name = f"{bridge.hpu.get_device_name()} ({self.device})"
        self._total = self._metrics().metric_global(COMPILED)

    # memory

    def memory(self) -> tuple[int, int]:
        self.synchronize()
        free, total = self._bridge.hpu.mem_get_info()
        return int(free), int(total)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:
            if any(words in str(e) for words in _OUT_OF_MEMORY):
                free, total = self.memory()
                raise OutOfDeviceMemoryError(f"{self.name}: {e} ({free} of {total} bytes are free)") from e
            raise

    # execution

    def synchronize(self) -> None:
        self._bridge.hpu.synchronize()

    def mark_step(self) -> None:
        """In lazy mode, compile and run the accumulated operators as one graph; otherwise do nothing."""
        if self.lazy:
            self._bridge.core.mark_step()

    def compiled(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run` as one graph of fixed shapes, compiled by its first call."""
        return whole_graph(run, backend="hpu_backend", options={"force_static_compile": True})

    @contextmanager
    def compile_only(self) -> Iterator[bool]:
        """Inside the block, graphs are compiled but not run; results are meaningless. Yields False if unsupported."""
        from habana_frameworks.torch.internal import bridge_config

        try:
            setting = bridge_config.env_setting(COMPILE_ONLY, True)
            setting.__enter__()
        except KeyError:
            _log.warning(
                "this release of the Gaudi software has no %s: graphs are compiled on their first run", COMPILE_ONLY
            )
            yield False
            return
        try:
            yield True
        finally:
            setting.__exit__(None, None, None)

    def capture(self, run: Callable[..., Sequence[Any]], inputs: Sequence[Any]) -> HpuGraph:
        """Run once and record the accelerator's work. Raises OutOfDeviceMemoryError, leaving nothing behind."""
        graph = self._bridge.hpu.HPUGraph()
        try:
            with self.guarded(), self._bridge.hpu.graph(graph, stream=self._bridge.hpu.default_stream()):
                outputs = run(*inputs)
        except BaseException:
            graph.reset()
            raise
        return HpuGraph(graph, list(inputs), outputs)

    # counters

    def compilations(self) -> int:
        return number(self._total.stats())

    @contextmanager
    def counting(self, metric: str) -> Iterator[Callable[[], Stats]]:
        """Measure a metric inside the block. With PT_HPU_METRICS_GC_DETAILS=1 its stats list each graph."""
        with self._metrics().metric_localcontext(metric) as local:
            yield local.stats

    def flush_recipes(self) -> None:
        """Wait until compiled recipes are on disk; releases without this call write them until the process ends."""
        from habana_frameworks.torch.utils import debug

        flush = getattr(debug, "_flush_disk_cache", None)
        if flush is not None:
            flush()

    def _metrics(self) -> Any:
        from habana_frameworks.torch.hpu import metrics

        return metrics


class HpuGraph:
    """A captured HPU graph, which reads and writes fixed addresses."""

    def __init__(self, graph: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._graph, self._inputs, self._outputs = graph, inputs, outputs

    def replay(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Copy `inputs` from the host and replay; the outputs are valid until the next replay."""
        for location, value in zip(self._inputs, inputs, strict=True):
            location.copy_(value)
        self._graph.replay()
        return self._outputs

    def reset(self) -> None:
        self._graph.reset()


def number(stats: Stats) -> int:
    """The count in a metric's stats."""
    return int(dict(stats)["TotalNumber"])
