"""A thread that does one thing after the other for another thread, which goes on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Teller:
    """Does jobs in their order, one at a time; none waits behind the one that runs. Jobs may raise nothing.

    The interpreter does not wait for it when it ends, as it does for threads of concurrent.futures. `put` and `settle`
    are called in one thread only, or while no other calls them.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._idle = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], object]) -> None:
        """Begin a job as soon as the one before it is over, which this waits for."""
        self._idle.acquire()
        self._jobs.put(job)

    def settle(self) -> None:
        """Wait until all jobs are over."""
        with self._idle:
            pass

    def close(self) -> None:
        """End the thread after all jobs."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                self._idle.release()
