"""Counts what an executor's engine compiled: 0 from open to close, unless something was missing from the bundle.

Every executor has a counter of its own (executors/base.py) and tells it what its engine reports: a portable program
that was finished for its device, a program that JAX compiled, a model that OpenVINO compiled or imported, a session of
ONNX Runtime with the code that it loads. Whoever shows a number asks the executor, so that all show the same.
"""

from __future__ import annotations

import threading


class CompilationCounter:
    """Counts what was compiled, by name; thread-safe.

    Until `ready`, opening what a bundle brings is no compilation while serving. From then on everything is open, and
    whatever an engine opens is counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: list[str] = []
        self._opened: list[str] = []
        self._ready = False
        self._total: CompilationCounter | None = None

    def record(self, what: str) -> None:
        """Count one compilation of `what`, which the bundle did not bring ready-made."""
        with self._lock:
            self._compiled.append(what)
        if self._total is not None:
            self._total.record(what)

    def opened(self, what: str) -> None:
        """The engine compiled `what` when it opened what the bundle brings: not free, and until `ready` no compilation
        while serving."""
        if self._ready:
            self.record(what)
            return
        with self._lock:
            self._opened.append(what)
        if self._total is not None:
            self._total.opened(what)

    def loaded(self, what: str) -> None:
        """The engine opened `what` as it is, or loaded code: nothing to count until `ready`."""
        if self._ready:
            self.record(what)
        elif self._total is not None:
            self._total.loaded(what)

    def ready(self) -> None:
        """Everything is open."""
        self._ready = True

    def part_of(self, total: CompilationCounter) -> None:
        """Tell `total` all that was counted, and all that will be."""
        for what in self._compiled:
            total.record(what)
        for what in self._opened:
            total.opened(what)
        self._total = total

    @property
    def at_open(self) -> tuple[str, ...]:
        """What the engine compiled at open, in order."""
        return tuple(self._opened)

    @property
    def count(self) -> int:
        """Compilations so far."""
        return len(self._compiled)

    @property
    def compiled(self) -> tuple[str, ...]:
        """What was compiled, in order."""
        return tuple(self._compiled)
