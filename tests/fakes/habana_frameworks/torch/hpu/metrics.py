"""Counters of the bridge, as hpu/metrics/metrics.py has them: global since the import, local inside a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from habana_frameworks.torch import _accelerator

KNOWN = ("graph_compilation", "cpu_fallback", "memory_defragmentation", "recipe_cache")


class Metric:
    def __init__(self, name: str) -> None:
        self._name, self._number, self._time = name, 0, 0.0
        self.start()

    def name(self) -> str:
        return self._name

    def start(self) -> None:
        _accelerator.listeners.append(self._heard)

    def stop(self) -> None:
        _accelerator.listeners.remove(self._heard)

    def _heard(self, name: str, seconds: float, what: str) -> None:
        if name == self._name:
            self._number += 1
            self._time += seconds

    def stats(self) -> list[tuple[str, float]]:
        average = self._time / self._number if self._number else 0
        return [("TotalNumber", self._number), ("TotalTime", self._time), ("AvgTime", average)]


_global = {name: Metric(name) for name in KNOWN}


def metric_global(name: str) -> Metric | None:
    return _global.get(name)


@contextmanager
def metric_localcontext(name: str) -> Iterator[Metric]:
    if name not in KNOWN:
        raise RuntimeError(f"Metric with given name ({name}) doesn't exist.")
    metric = Metric(name)
    try:
        yield metric
    finally:
        metric.stop()
