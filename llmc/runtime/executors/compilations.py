"""Counts compilations at run time, and monitors them independently.

Every executor has a counter (executors/base.py). It stays 0 from open to close unless the bundle lacked something. The
executor records what its device's software compiles: a portable program compiled on its target, a JAX compilation, an
OpenVINO model compiled or imported, an ONNX Runtime session with the code that it loads. All numbers that llmc reports
come from this counter.

A monitor sees compilations without the executor's help. `llmc warmup --certify` uses the executor's monitors
(`CompilationCounter.monitors`) and those of the whole process (runtime/certificate/monitors/).
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class CompilationCounter:
    """Counts compilations by name. Thread-safe.

    Until `ready`, opening the bundle's files does not count as compiling while serving. Afterwards whatever an engine
    opens is counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: list[str] = []
        self._opened: list[str] = []
        self.is_ready = False
        self.monitors: list[Monitor] = [CounterMonitor(self)]
        """Monitors of the executor and its device's software. Executors append to this."""
        self._total: CompilationCounter | None = None

    def record(self, what: str) -> None:
        """Count one compilation of `what`, which the bundle lacked in compiled form."""
        with self._lock:
            self._compiled.append(what)
        if self._total is not None:
            self._total.record(what)

    def opened(self, what: str) -> None:
        """Record that the engine compiled `what` at open. Until `ready` it does not count as compiled while serving."""
        if self.is_ready:
            self.record(what)
            return
        with self._lock:
            self._opened.append(what)
        if self._total is not None:
            self._total.opened(what)

    def loaded(self, what: str) -> None:
        """Record that the engine opened `what` unchanged, or loaded code; not counted until `ready`."""
        if self.is_ready:
            self.record(what)
        elif self._total is not None:
            self._total.loaded(what)

    def ready(self) -> None:
        self.is_ready = True

    def part_of(self, total: CompilationCounter) -> None:
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
        return len(self._compiled)

    @property
    def compiled(self) -> tuple[str, ...]:
        return tuple(self._compiled)


class Monitor(ABC):
    """Sees compilations of one kind from `start` to `stop`. `name` is its name in certificates.

    A monitor that cannot see states why (`blind`); its count is then unknown, never 0.
    """

    name: str

    def start(self) -> None:  # noqa: B027 - many see by themselves
        """Start monitoring. Called once."""

    def stop(self) -> None:  # noqa: B027
        """Stop monitoring and restore the process; results are kept. Called once after `start`."""

    @abstractmethod
    def what(self) -> Sequence[str]:
        """Names seen since `start`, in order; the list only grows. The last call precedes `stop`."""

    def blind(self) -> str:
        """Why something may have been missed since `start`, or ""."""
        return ""

    def count(self) -> int | None:
        """How many were seen; None if the monitor is blind and saw nothing."""
        return len(self.what()) or (None if self.blind() else 0)


class CounterMonitor(Monitor):
    """Reports everything that an executor recorded in its counter, also at open."""

    name = "executables"

    def __init__(self, counter: CompilationCounter) -> None:
        self._counter = counter

    def what(self) -> Sequence[str]:
        return (*self._counter.at_open, *self._counter.compiled)


class CallsMonitor(Monitor):
    """Sees calls of a class's methods by anyone in the process, by wrapping them; `methods` maps each to a namer of
    calls.
    """

    def __init__(self, name: str, owner: type, methods: Mapping[str, Callable[..., str]]) -> None:
        self.name = name
        self._owner = owner
        self._methods = methods
        self._seen: list[str] = []
        self._wrappers: dict[str, Callable[..., Any]] = {}
        self._looks = False
        self._lock = threading.Lock()

    def start(self) -> None:
        self._looks = True
        for method, name_of in self._methods.items():
            before = getattr(self._owner, method)
            self._wrappers[method] = wrapper = self._wrapped(before, name_of)
            setattr(self._owner, method, wrapper)

    def _wrapped(self, method: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(owner: Any, *arguments: Any, **named: Any) -> Any:
            if self._looks:
                with self._lock:
                    self._seen.append(name_of(*arguments, **named))
            return method(owner, *arguments, **named)

        return call

    def stop(self) -> None:
        """Restore the methods. One that somebody else has wrapped since stays, and forwards calls."""
        self._looks = False
        for method, wrapper in self._wrappers.items():
            if getattr(self._owner, method) is wrapper:
                setattr(self._owner, method, wrapper.__wrapped__)
        self._wrappers.clear()

    def what(self) -> Sequence[str]:
        return tuple(self._seen)
