"""Counts compilations at run time, and watches for them from outside.

Every executor has a counter (executors/base.py). It stays 0 from open to close, unless something was missing from the
bundle. The executor reports to it what its device's software reports: a portable program that was finished for the
device, a program that JAX compiled, a model that OpenVINO compiled or imported, an ONNX Runtime session with the code
that it loads. Every number that llmc shows comes from this counter.

A monitor sees compilations without the executor's help. `llmc warmup --certify` asks those of the executor
(`CompilationCounter.monitors`) and those of the whole process (runtime/certificate/monitors/).
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class CompilationCounter:
    """Counts what was compiled, by name; thread-safe.

    Until `ready`, opening what a bundle brings is no compilation while serving. From then on everything is open, and
    whatever an engine opens is counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: list[str] = []
        self._opened: list[str] = []
        self.is_ready = False
        self.monitors: list[Monitor] = [CounterMonitor(self)]
        """Watch what the executor and its device's software compile. An executor adds those of that software."""
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
        if self.is_ready:
            self.record(what)
            return
        with self._lock:
            self._opened.append(what)
        if self._total is not None:
            self._total.opened(what)

    def loaded(self, what: str) -> None:
        """The engine opened `what` as it is, or loaded code: nothing to count until `ready`."""
        if self.is_ready:
            self.record(what)
        elif self._total is not None:
            self._total.loaded(what)

    def ready(self) -> None:
        """Everything is open, and requests come from now on."""
        self.is_ready = True

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


class Monitor(ABC):
    """Sees compilations of one kind from `start` to `stop`. `name` is what certificates call it.

    A monitor that cannot see says why (`blind`). What it did not see is unknown then, never 0.
    """

    name: str

    def start(self) -> None:  # noqa: B027 - many see by themselves
        """Look from now on. Called once."""

    def stop(self) -> None:  # noqa: B027
        """Look no longer, and leave the process as it was; what was seen is kept. Called once after `start`."""

    @abstractmethod
    def what(self) -> Sequence[str]:
        """What was seen since `start`, by name, in order: it only grows. The last call comes before `stop`."""

    def blind(self) -> str:
        """Why something may have happened unseen since `start`; "": nothing did."""
        return ""

    def count(self) -> int | None:
        """How many were seen; None: the monitor is blind, and saw nothing of what may have been."""
        return len(self.what()) or (None if self.blind() else 0)


class CounterMonitor(Monitor):
    """What an executor tells its counter: all that its engine compiled, at open, too (executors/compilations.py)."""

    name = "executables"

    def __init__(self, counter: CompilationCounter) -> None:
        self._counter = counter

    def what(self) -> Sequence[str]:
        """At open first; once the executor is ready, only the others grow."""
        return (*self._counter.at_open, *self._counter.compiled)


class CallsMonitor(Monitor):
    """Sees calls of methods of a class, by anyone in the process, by wrapping the methods while it looks.

    `methods` gives the name of a call by its arguments, `self` left out.
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
        """Put the methods back; one that somebody else wrapped since stays, and passes calls on."""
        self._looks = False
        for method, wrapper in self._wrappers.items():
            if getattr(self._owner, method) is wrapper:
                setattr(self._owner, method, wrapper.__wrapped__)
        self._wrappers.clear()

    def what(self) -> Sequence[str]:
        return tuple(self._seen)
