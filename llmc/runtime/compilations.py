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
        self._opened: list[str] = []

    def record(self, what: str) -> None:
        """Count one compilation of `what`."""
        with self._lock:
            self._compiled.append(what)

    def opened(self, what: str) -> None:
        """Note that the toolchain compiled `what` when it was opened, before any request: not a compilation while
        serving, and not free either."""
        with self._lock:
            self._opened.append(what)

    @property
    def at_open(self) -> tuple[str, ...]:
        """What the toolchain compiled at open, in order."""
        return tuple(self._opened)

    @property
    def count(self) -> int:
        """Compilations so far."""
        return len(self._compiled)

    @property
    def compiled(self) -> tuple[str, ...]:
        """What was compiled, in order."""
        return tuple(self._compiled)


COMPILATIONS = CompilationCounter()
