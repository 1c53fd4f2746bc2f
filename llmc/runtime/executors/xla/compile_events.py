"""Compilations that JAX reports, passed to the executor in whose call they happen.

JAX reports every compilation of its backend to listeners of the process (`jax.monitoring`), in the thread that asked
for it. Loading an executable is none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llmc.runtime.executors.witness import Witness

COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's name of the event."""

_lock = threading.Lock()
_listens = False
_here = threading.local()
_compiled: list[str] = []


@contextmanager
def told(tell: Callable[[str], None] | None) -> Iterator[None]:
    """`tell` is called for each compilation of JAX in this thread until the block ends; None: no calls."""
    before = getattr(_here, "tell", None)
    _here.tell = tell
    try:
        yield
    finally:
        _here.tell = before


def listen() -> None:
    """Listen to JAX's compilations from now on."""
    global _listens  # noqa: PLW0603 - JAX keeps listeners for the whole process
    from jax import monitoring

    with _lock:
        if not _listens:
            monitoring.register_event_duration_secs_listener(_heard)
            _listens = True


def listens() -> bool:
    """Whether every compilation of this process has been heard since JAX's first."""
    return _listens


class JaxWitness(Witness):
    """Sees each compilation of JAX in the process, in any thread, that is heard after `listen`."""

    name = "JAX compile events"

    def __init__(self) -> None:
        self._first = len(_compiled)

    def what(self) -> Sequence[str]:
        """The programs."""
        return tuple(_compiled[self._first :])


def _heard(event: str, duration: float, **facts: Any) -> None:
    if event != COMPILED:
        return
    what = f"jax: {facts.get('fun_name', 'a program')}"
    _compiled.append(what)
    tell = getattr(_here, "tell", None)
    if tell is not None:
        tell(what)
