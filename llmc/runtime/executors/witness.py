"""Witnesses: whoever sees that something was compiled, started or written. What `llmc warmup --certify` asks.

An executor names its own (`Executor.witnesses`); those of the whole process are in runtime/certificate/witnesses.py.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.runtime.executors.compilations import CompilationCounter


class Witness(ABC):
    """Sees compilations of one kind from `start` to `stop`. `name` is what certificates call it.

    A witness that cannot see says why (`blind`). What it did not see is unknown then, never 0.
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
        """How many were seen; None: the witness is blind, and saw nothing of what may have been."""
        return len(self.what()) or (None if self.blind() else 0)


class CounterWitness(Witness):
    """What an executor tells its counter: all that its engine compiled, at open, too (executors/compilations.py)."""

    name = "executables"

    def __init__(self, counter: CompilationCounter) -> None:
        self._counter = counter

    def what(self) -> Sequence[str]:
        """At open first; once the executor is ready, only the others grow."""
        return (*self._counter.at_open, *self._counter.compiled)


class CallsWitness(Witness):
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
        """Wrap the methods."""
        self._looks = True
        for method, tell in self._methods.items():
            before = getattr(self._owner, method)
            self._wrappers[method] = wrapper = self._wrapped(before, tell)
            setattr(self._owner, method, wrapper)

    def _wrapped(self, method: Callable[..., Any], tell: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(owner: Any, *arguments: Any, **named: Any) -> Any:
            if self._looks:
                with self._lock:
                    self._seen.append(tell(*arguments, **named))
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
        """The calls."""
        return tuple(self._seen)
