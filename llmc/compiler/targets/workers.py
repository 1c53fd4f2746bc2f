"""Processes that compile. Only the parent handles an interrupt, and it ends them at once."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType


class Workers(ProcessPoolExecutor):
    """`jobs` processes at once. With `preload`, modules by name, each task has a process that ran nothing before.

    Where its block is left by an exception, nobody waits for what still runs.
    """

    def __init__(self, jobs: int, preload: Sequence[str] = ()) -> None:
        if preload:
            context = get_context("forkserver")
            context.set_forkserver_preload(list(preload))
            super().__init__(jobs, mp_context=context, initializer=_leave_interrupts, max_tasks_per_child=1)
        else:
            super().__init__(jobs, mp_context=get_context("spawn"), initializer=_leave_interrupts)

    def stop(self) -> None:
        """Kill the processes; their tasks fail with BrokenProcessPool."""
        for process in list((self._processes or {}).values()):  # kill_workers, from Python 3.14 on
            process.kill()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self.stop()
        super().__exit__(kind, error, tb)


def _leave_interrupts() -> None:
    """Ctrl-C reaches every process of a terminal; this one would print a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
