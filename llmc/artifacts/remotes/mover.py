"""Concurrent transfers: threads, a common byte count, and a common end when one fails fatally."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, TypeVar

from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.remotes.base import Meter, ObjectError, Refused, RemoteError, StoppedError
from llmc.errors import ArtifactError

P = ParamSpec("P")
T = TypeVar("T")


class Mover:
    """A context manager for transfers; when it exits, none runs any more, and it cannot be used again."""

    def __init__(self, jobs: int, meter: Meter | None = None) -> None:
        self._pool = ThreadPoolExecutor(max(1, jobs), thread_name_prefix="llmc-transfer")
        self._meter = meter
        self._lock = threading.Lock()
        self._done = self._total = 0
        self._stopped = False
        self._fatal: BaseException | None = None
        self.refused: list[Refused] = []

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stopped = self._stopped or error is not None
        self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Start a call in a thread."""

        def guarded() -> T:
            try:
                self.moved(0)
                return call(*arguments, **named)
            except BaseException as error:
                if not may_be_refused(error):
                    with self._lock:
                        self._fatal = self._fatal or error
                        self._stopped = True
                raise

        return self._pool.submit(guarded)

    def result(self, future: Future[T]) -> T:
        """Return the result of a call. Raises what the transfer raised, or what ended all."""
        try:
            return future.result()
        except (StoppedError, CancelledError):
            if self._fatal is not None:
                raise self._fatal from None
            raise

    def outcome(self, name: str, future: Future[T]) -> T | None:
        """Return the result; None if it failed for a reason that concerns only `name`, which is added to `refused`.

        Raises what ended all transfers.
        """
        try:
            return self.result(future)
        except ArtifactError as error:
            if not may_be_refused(error):
                raise
            self.refused.append(Refused(name, str(error)))
            return None

    @property
    def stopped(self) -> bool:
        """Whether all transfers are to end."""
        return self._stopped

    def expect(self, count: int) -> None:
        """Add `count` bytes to the total."""
        with self._lock:
            self._total += count

    def moved(self, count: int) -> None:
        """Count `count` moved bytes. Raises StoppedError if all transfers are to end."""
        if self._stopped:
            raise StoppedError
        if self._meter is not None and count:
            with self._lock:
                self._done += count
                self._meter(self._done, self._total)


def may_be_refused(error: BaseException) -> bool:
    """Whether a failure concerns only one object, so that the others continue."""
    if isinstance(error, RemoteError):
        return isinstance(error, ObjectError)
    return isinstance(error, ArtifactError) and not isinstance(error, UnwritableError)
