"""The counter of compilations while serving: 0 from open to close, or something was missing from the bundle.

Executors count here whatever makes an executable that the bundle did not bring ready-made: a graph optimised at open,
a shape compiled on demand, a portable program finished for its device.
"""

from __future__ import annotations

import threading


class CompilationCounter:
    """Counts compilations in this process, with what was compiled; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: list[str] = []

    def record(self, what: str) -> None:
        """Count one compilation of `what`."""
        with self._lock:
            self._compiled.append(what)

    @property
    def count(self) -> int:
        """Compilations so far."""
        return len(self._compiled)

    @property
    def compiled(self) -> tuple[str, ...]:
        """What was compiled, in order."""
        return tuple(self._compiled)


COMPILATIONS = CompilationCounter()
