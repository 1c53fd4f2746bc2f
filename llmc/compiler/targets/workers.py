"""Compiler processes, and the threads that wait for them. Only the parent handles an interrupt, and kills them at once.

`run_tool` runs a device's compiler as a process of its own that leaves no process behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from llmc.errors import CompileError

T = TypeVar("T")
R = TypeVar("R")


class Workers(ProcessPoolExecutor):
    """A pool of `jobs` processes; with `preload`, module names, each task gets a fresh one. An exception waits for no
    task.
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


class Jobs:
    """Runs up to `jobs` tasks at once in threads; `apart` runs in a process of the pool that `workers` makes on first
    use.
    """

    def __init__(self, jobs: int, workers: Callable[[int], Workers] | None) -> None:
        self._jobs, self._workers = jobs, workers
        self._starting = threading.Lock()
        self._pool: Workers | None = None

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)

    def each(
        self, work: Callable[[T], R], items: Sequence[T], done: Callable[[T, R], None] = lambda item, result: None
    ) -> list[R]:
        """Return the results of `work` in the order of `items`; this thread calls `done` with each as it finishes.

        The first error kills the processes, and is raised when no thread runs any more. Nothing starts after it.
        """
        errors: list[BaseException] = []

        def unless_failed(item: T) -> R:
            if errors:
                raise CancelledError
            try:
                return work(item)
            except BaseException as error:
                errors.append(error)
                raise

        with ThreadPoolExecutor(self._jobs, thread_name_prefix="llmc-compile") as threads:
            futures = [threads.submit(unless_failed, item) for item in items]
            numbers = {future: at for at, future in enumerate(futures)}
            try:
                for future in as_completed(futures):
                    if future.exception() is not None:
                        raise errors[0]
                    done(items[numbers[future]], future.result())
            except BaseException:
                if self._pool is not None:
                    self._pool.stop()
                threads.shutdown(wait=True, cancel_futures=True)  # running jobs read these files until then
                raise
        return [future.result() for future in futures]

    def apart(self, what: str, function: Callable[..., R], *arguments: Any) -> R:
        """Run `function`, which compiles `what`. Raises CompileError where its process is killed."""
        if self._workers is None:
            return function(*arguments)
        with self._starting:
            if self._pool is None:
                self._pool = self._stack.enter_context(self._workers(self._jobs))
        try:
            return self._pool.submit(function, *arguments).result()
        except BrokenProcessPool as e:
            raise CompileError(
                f"a worker process was killed while {what} was compiled, perhaps for lack of memory; other "
                f"results are kept: try again with fewer than --jobs {self._jobs}"
            ) from e


def _leave_interrupts() -> None:
    """Ctrl-C reaches every process of a terminal; this one would print a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


_LAST = 3
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def run_tool(
    command: Sequence[str],
    folder: str | Path,
    out: int,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> int | None:
    """Run a command with output to the file `out`; return its exit code, negative for a signal, None after `seconds`.

    It runs in its own process group, which ends with it and with this process.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        env=environment,
        process_group=0,
        preexec_fn=_die_with_parent(),  # noqa: PLW1509 - one call of the C library
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_lines(log: Path) -> list[str]:
    """Return the last non-empty lines of a tool's log, for an error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return [line[:500] for line in lines if line][-_LAST:]


def _die_with_parent() -> Callable[[], object] | None:
    """Kills the compiler when its worker is killed."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return lambda: library.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
