"""Supervises replicas: accepts connections for them, restarts dead ones, and stops all of them in order.

A connection goes to the replica with the fewest, so that neither a burst nor a long response queues at one while
another is idle. Kernel balancing (SO_REUSEPORT, or one shared socket) does not guarantee that. A replica that is not
ready gets connections only if none is ready.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from mmap import mmap
from typing import TYPE_CHECKING, Any

from llmc.errors import LlmcError
from llmc.server.bell import bell, nothing
from llmc.server.events import Draining, OnEvent, Ready, ReplicaBack, ReplicaLost, Stopped
from llmc.server.replicas.process import ReplicaFailure, ReplicaProcess, Run, start
from llmc.server.serve import SIGNALS, handled, means_swap
from llmc.server.watchdog import GRACE_S, HURRY_S

if TYPE_CHECKING:
    from llmc.server.listening import Listener

STEADY_S = 60.0
"""Seconds of service after which a dead replica is restarted at once, as if it were the first failure."""
LONGEST_S = 60.0
_AT_ONCE = 64


class Supervisor:
    """Runs `count` replicas, each as `run(number, socket)`; `started` is shared memory, one byte for each.

    Use it in the main thread of a process without other threads.
    """

    def __init__(
        self, listener: Listener, count: int, run: Callable[[int, socket.socket], int], started: mmap,
        report: OnEvent, shutdown_timeout_s: float,
    ) -> None:  # fmt: skip
        self._listener, self._run, self._started = listener, run, started
        self._report, self._timeout_s = report, shutdown_timeout_s
        self._replicas: list[ReplicaProcess] = []
        self._due = dict.fromkeys(range(count), 0.0)
        """Start times of replicas that are not running."""
        self._deaths = [0] * count
        self._began = time.monotonic()
        self._signals: list[int] = []
        self._kill_at = float("inf")
        self._stopped_at = 0.0
        self._cancelled = 0
        self._error: LlmcError | None = None
        self._draining_reported = False
        self._accepting = False

    def run(self) -> int:
        """Run until all replicas have ended; return the exit code like `serve`.

        Raises the error of a replica that ended before it was ever ready.
        """
        self._listener.socket.setblocking(False)
        self._means_swap = means_swap()
        with bell((signal.SIGCHLD,)) as self._bell, selectors.DefaultSelector() as self._selector, handled(nothing):
            self._bell.setblocking(False)
            try:
                self._selector.register(self._bell, selectors.EVENT_READ, self._rung)
                self._keep()
            finally:
                self._signal(signal.SIGKILL, self._replicas)
        if self._error is not None:
            raise self._error
        self._report(Stopped(self._cancelled, time.monotonic() - self._stopped_at))
        return 0 if len(self._signals) < 2 else 128 + self._signals[1]

    def _keep(self) -> None:
        while self._replicas or self._due:
            now = time.monotonic()
            for number in [number for number, due in self._due.items() if due <= now]:
                self._start(number)
            self._listen(bool(self._replicas))
            for key, _ in self._selector.select(max(0.0, self._next_s - now)):
                key.data()
            self._reap()
            if time.monotonic() >= self._kill_at:
                self._signal(signal.SIGKILL, self._replicas)
            self._report_draining()

    @property
    def _next_s(self) -> float:
        """When to wake up if nothing happens."""
        return min(*self._due.values(), self._kill_at, time.monotonic() + STEADY_S)

    def _start(self, number: int) -> None:
        del self._due[number]
        run: Run = lambda theirs: self._run(number, theirs)  # noqa: E731 - typed
        one = start(number, run, self._forget)
        self._replicas.append(one)
        self._selector.register(one.end, selectors.EVENT_READ, lambda: self._hear(one))

    def _forget(self) -> None:
        """Release the supervisor's resources in a replica."""
        signal.set_wakeup_fd(-1)
        for signum in (*SIGNALS, signal.SIGCHLD):
            if signal.getsignal(signum) is nothing:
                signal.signal(signum, signal.SIG_DFL)
        self._selector.close()
        for owned in (self._bell, self._listener.socket, *(other.end for other in self._replicas)):
            owned.close()

    def _listen(self, wanted: bool) -> None:
        """Accept connections only while a replica runs; otherwise they wait in the kernel."""
        if wanted and not self._accepting:
            self._selector.register(self._listener.socket, selectors.EVENT_READ, self._accept)
        elif self._accepting and not wanted:
            self._selector.unregister(self._listener.socket)
        self._accepting = wanted

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _address = self._listener.socket.accept()
            except OSError:  # none waits, or it has closed already
                return
            with connection:
                any(one.give(connection) for one in sorted(self._replicas, key=lambda one: one.burden))

    def _hear(self, one: ReplicaProcess) -> None:
        for reported in one.news():
            match reported:
                case Ready():
                    self._ready(one, reported)
                case Stopped():
                    self._cancelled += reported.cancelled
                case None | ReplicaFailure() | Draining():
                    pass
                case _:
                    self._report(reported)

    def _ready(self, one: ReplicaProcess, reported: Ready) -> None:
        all_were = self._all_started
        self._started[one.number] = 1
        if all_were:
            self._report(ReplicaBack(one.number, time.monotonic() - one.began))
        elif self._all_started:
            each = [other.ready for other in self._replicas if other.ready is not None]
            counted = {name: sum(getattr(ready, name) for ready in each) for name in ("warmed", "compilations")}
            self._report(replace(reported, seconds=time.monotonic() - self._began, **counted))

    @property
    def _all_started(self) -> bool:
        return all(self._started[:])

    def _rung(self) -> None:
        for signum in self._bell.recv(1 << 12):
            if self._means_swap(signum):  # a starting replica opens the current bundle anyway
                self._signal(signum, [one for one in self._replicas if one.ready])
            elif signum in SIGNALS:
                self._stop(signum)

    def _stop(self, signum: int) -> None:
        """Drain all; the second time, stop them without waiting."""
        self._signals.append(signum)
        if len(self._signals) == 1:
            self._stopped_at = time.monotonic()
        self._end(HURRY_S if len(self._signals) > 1 else self._timeout_s + GRACE_S)

    def _end(self, within_s: float) -> None:
        """Terminate all; kill those that their own watchdog does not end in time."""
        self._due.clear()
        self._kill_at = time.monotonic() + within_s + HURRY_S
        self._signal(signal.SIGTERM, self._replicas)

    def _signal(self, signum: int, to: Iterable[ReplicaProcess]) -> None:
        for one in to:
            one.signal(signum)

    def _reap(self) -> None:
        for one in list(self._replicas):
            if one.ended():
                self._hear(one)
                self._selector.unregister(one.end)
                one.end.close()
                self._replicas.remove(one)
                self._lost(one)

    def _lost(self, one: ReplicaProcess) -> None:
        if self._signals or self._error is not None:
            return
        if not self._all_started:
            self._error = (
                one.failure.error if one.failure else LlmcError(f"replica {one.number} did not start: {one.why}")
            )
            self._end(self._timeout_s + GRACE_S)
            return
        steady = one.ready is not None and time.monotonic() - one.began > STEADY_S
        self._deaths[one.number] = 1 if steady else self._deaths[one.number] + 1
        again_s = 0.0 if self._deaths[one.number] == 1 else min(LONGEST_S, 2.0 ** (self._deaths[one.number] - 2))
        self._due[one.number] = time.monotonic() + again_s
        self._report(ReplicaLost(one.number, one.why, again_s))

    def _report_draining(self) -> None:
        """Report draining once, when each replica has reported its requests or has ended."""
        reported: list[Any] = [one.draining for one in self._replicas]
        if not self._signals or self._draining_reported or None in reported:
            return
        self._draining_reported = True
        if reported:
            running, waiting = (sum(getattr(each, name) for each in reported) for name in ("running", "waiting"))
            self._report(Draining(signal.Signals(self._signals[0]).name, running, waiting, self._timeout_s))
