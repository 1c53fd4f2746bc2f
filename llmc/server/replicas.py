"""`serve` with several processes on one host: one port, shared CPUs, weights mapped once.

A supervisor accepts connections and passes each to the replica with the fewest, so that neither a burst nor a long
response queues at one while another is idle. Kernel balancing (SO_REUSEPORT, or one shared socket) does not guarantee
that. A replica that is not ready gets connections only if none is ready. Replicas report in lines:

    line = "-" | {"event": name, field: value, …} | {"error": text, "code": exit code}

"-": a connection has ended. The supervisor sends connections, each with one byte. Each replica also has a Unix socket,
in a folder that only this user can enter, to serve its metrics to the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from llmc.artifacts.temporaries import temporary_folder
from llmc.cpus import allowed_cpus, shares, usable_cpus
from llmc.errors import InputError, LlmcError
from llmc.runtime.startup.opening import EngineOptions
from llmc.server.events import (
    Dead,
    Draining,
    Event,
    Listening,
    OnEvent,
    Ready,
    ReplicaBack,
    ReplicaLost,
    Retired,
    Stopped,
    Swapped,
    SwapRefused,
    WarmAside,
)
from llmc.server.listening import Listener
from llmc.server.serve import GRACE_S, HURRY_S, SIGNALS, bell, handled, listen_at, means_swap, nothing, serve
from llmc.server.state import Progress
from llmc.server.telemetry.metrics import SCRAPE_S, text_of, together
from llmc.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client import Metric

    from llmc.server.listening import Sockets, Take
    from llmc.server.loading import OpenBundle
    from llmc.server.state import ServerConfig, ServerState


UNEXPECTED = 1
"""Exit code of a process that ended on an unexpected error."""
Run = Callable[[socket.socket], int]
"""The work of a replica, given its end of the socket; returns its exit code."""


HANDED = b"+"
ENDED = b"-\n"
_EVENTS = {kind.__name__: kind for kind in (Ready, WarmAside, Swapped, SwapRefused, Retired, Draining, Dead, Stopped)}
"""Events sent to a supervisor: it knows where it listens, and /ready reports loading progress."""


@dataclass(frozen=True)
class ReplicaFailure:
    """The error that ended a replica, and its exit code."""

    message: str
    code: int

    @property
    def error(self) -> LlmcError:
        """The same error for the command line, with that exit code."""
        raised = LlmcError(self.message)
        raised.exit_code = self.code
        return raised


ReplicaReport: TypeAlias = Event | ReplicaFailure | None


@dataclass(eq=False)
class ReplicaProcess:
    """Replica `number` in process `pid`; `end` is the supervisor's end of the socket between them."""

    number: int
    pid: int
    end: socket.socket
    began: float = field(default_factory=time.monotonic)
    ready: Ready | None = None
    draining: Draining | None = None
    failure: ReplicaFailure | None = None
    condemned: bool = False
    """Whether it must end, because its engine died."""
    connections: int = 0
    given: int = 0
    _rest: bytes = b""
    _code: int = 0

    @property
    def burden(self) -> tuple[bool, int, int]:
        """Sort key, least first: ready, then fewest open connections, then fewest connections so far."""
        return self.ready is None or self.condemned, self.connections, self.given

    def give(self, connection: socket.socket) -> bool:
        """Pass a connection on; false if it takes none now."""
        try:
            socket.send_fds(self.end, [HANDED], [connection.fileno()])
        except OSError:  # it has ended, or has not read for long
            return False
        self.connections += 1
        self.given += 1
        return True

    def news(self) -> Iterator[ReplicaReport]:
        """Yield its reports since the last call."""
        with suppress(OSError):
            while data := self.end.recv(1 << 16):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        for reported in map(reported_by, lines):
            self._note(reported)
            yield reported

    def _note(self, reported: ReplicaReport) -> None:
        match reported:
            case None:
                self.connections -= 1
            case Ready():
                self.ready = reported
            case Draining():
                self.draining = reported
            case ReplicaFailure():
                self.failure = reported
            case Dead():
                self.condemned = True
                self.signal(signal.SIGTERM)

    def signal(self, signum: int) -> None:
        """Send a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def ended(self) -> bool:
        """Whether it has ended; do not call again after true."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self._code = os.waitstatus_to_exitcode(status)
        return bool(pid)

    @property
    def why(self) -> str:
        """Why it ended."""
        if self.failure is not None:
            return self.failure.message
        if self.condemned:
            return "its engine stopped on an error"
        return f"exit code {self._code}" if self._code >= 0 else f"ended by {signal.Signals(-self._code).name}"


def start(number: int, run: Run, forget: Callable[[], None]) -> ReplicaProcess:
    """Fork a process that runs `run` in its own session, so that terminal signals reach only the supervisor.

    The child first calls `forget`, to release the supervisor's resources. Call it while there is only one thread.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        ours.setblocking(False)
        return ReplicaProcess(number, pid, ours)
    code = UNEXPECTED
    try:
        ours.close()
        os.setsid()
        forget()
        code = run(theirs)
    except BaseException:  # noqa: BLE001 - the child must never return to the supervisor's code
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)


def failure_of(error: Exception) -> ReplicaFailure:
    """Describe an error for the supervisor."""
    if isinstance(error, LlmcError):
        return ReplicaFailure(str(error), error.exit_code)
    return ReplicaFailure(f"unexpected {type(error).__name__}: {error}", UNEXPECTED)


def line_of(reported: Event | ReplicaFailure) -> bytes:
    """Return the line; empty for events that the supervisor does not use."""
    if isinstance(reported, ReplicaFailure):
        return json.dumps({"error": reported.message, "code": reported.code}).encode() + b"\n"
    name = type(reported).__name__
    return json.dumps({"event": name, **asdict(reported)}).encode() + b"\n" if name in _EVENTS else b""


def reported_by(line: bytes) -> ReplicaReport:
    """Parse a line; None: a connection has ended."""
    if line + b"\n" == ENDED:
        return None
    fields = json.loads(line)
    if "error" in fields:
        return ReplicaFailure(fields["error"], fields["code"])
    return _EVENTS[fields.pop("event")](**fields)


_HANDED_AT_ONCE = 16


@dataclass(frozen=True)
class Handed(Listener):
    """Replica `number`'s end of its supervisor's `socket`, and the `folder` of the replicas' own sockets.

    `started` is shared memory, one byte per replica: 1 once it has been ready.
    """

    number: int = 0
    folder: Path = field(kw_only=True)
    started: mmap = field(kw_only=True)
    _sending: threading.Lock = field(default_factory=threading.Lock, compare=False)
    _kept: set[object] = field(default_factory=set, compare=False)
    """Running tasks that nothing else refers to."""

    @property
    def sockets(self) -> Sockets:
        """None: connections arrive already accepted."""
        return ()

    @property
    def local(self) -> bool:
        """True: only the supervisor reports who can connect."""
        return True

    def close(self) -> None:
        """Do nothing: the supervisor sees how the process ends."""

    def on_progress(self, reported: Event | ReplicaFailure) -> None:
        """Report to the supervisor; thread-safe."""
        self._send(line_of(reported))

    def _send(self, line: bytes) -> None:
        with self._sending, suppress(OSError):  # it has ended; `_receive` ends this process
            self.socket.sendall(line)

    async def begin(self, take: Take, state: ServerState) -> None:
        """Pass connections to `take` until the supervisor ends, which stops the server."""
        state.awaits, state.all_metrics = self._awaits, self._all_metrics

        async def report_metrics(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            del reader
            text, _ = await asyncio.to_thread(lambda: text_of(state.metrics_as(str(self.number))))
            with suppress(OSError):
                writer.write(text)
                await writer.drain()
            writer.close()

        path = self.folder / str(self.number)
        path.unlink(missing_ok=True)  # left by a replica that was killed
        self._kept.add(await asyncio.start_unix_server(report_metrics, path))
        asyncio.get_running_loop().add_reader(self.socket, self._receive, take)

    def _receive(self, take: Take) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, _HANDED_AT_ONCE, _HANDED_AT_ONCE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        loop = asyncio.get_running_loop()
        if not data:
            loop.remove_reader(self.socket)
            os.kill(os.getpid(), signal.SIGTERM)
        for fd in fds:
            os.set_inheritable(fd, False)
            task = loop.create_task(take(socket.socket(fileno=fd), lambda: self._send(ENDED)))
            self._kept.add(task)
            task.add_done_callback(self._kept.discard)

    def _awaits(self) -> Progress | None:
        done, total = sum(self.started[:]), len(self.started)
        return Progress("replicas", done, total) if done < total else None

    async def _all_metrics(self) -> Sequence[Metric]:
        requested = (self._metrics_of(number) for number in range(len(self.started)))
        answers = await asyncio.gather(*requested, return_exceptions=True)
        return together(answer for answer in answers if not isinstance(answer, BaseException))

    async def _metrics_of(self, number: int) -> Sequence[Metric]:
        async with asyncio.timeout(SCRAPE_S):
            reader, writer = await asyncio.open_unix_connection(self.folder / str(number))
            text = (await reader.read()).decode()
            writer.close()
        return list(text_string_to_metric_families(text))


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
        """Run until all replicas end; return the exit code. Raises the error of one that ended before it was ready."""
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
        return min(*self._due.values(), self._kill_at, time.monotonic() + STEADY_S)

    def _start(self, number: int) -> None:
        del self._due[number]
        run: Run = lambda theirs: self._run(number, theirs)  # noqa: E731 - typed
        one = start(number, run, self._forget)
        self._replicas.append(one)
        self._selector.register(one.end, selectors.EVENT_READ, lambda: self._hear(one))

    def _forget(self) -> None:
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
        """Once, when each replica has reported its requests or has ended."""
        reported: list[Any] = [one.draining for one in self._replicas]
        if not self._signals or self._draining_reported or None in reported:
            return
        self._draining_reported = True
        if reported:
            running, waiting = (sum(getattr(each, name) for each in reported) for name in ("running", "waiting"))
            self._report(Draining(signal.Signals(self._signals[0]).name, running, waiting, self._timeout_s))


def serve_replicas(
    count: int, config: ServerConfig, open_bundle: OpenBundle, *, options: EngineOptions | None = None,
    report: OnEvent = lambda _: None, uds: Path | None = None, **how: Any,
) -> int:  # fmt: skip
    """Run `serve` in `count` processes; `how` is passed to it. Connection and request bounds apply to each process.

    A replica gets its share of the CPUs, and a thread for each unless `options` say otherwise. The bundle's weights are
    pages of one file, which all processes share. `/metrics` covers all replicas, and SIGHUP swaps the bundle in each.

    Raises InputError for more replicas than CPUs and for options that several processes cannot share, and the error of
    a replica that ended before all were ready once.
    """
    options = options or EngineOptions()
    threads = _check(count, config, options)
    listener = listen_at(config, uds)
    started = mmap(-1, count)
    with temporary_folder("replicas") as folder:

        def run(number: int, theirs: socket.socket) -> int:
            handed = Handed(theirs, listener.url, number=number, folder=folder, started=started)
            cpus = shares(count)[number]
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, cpus)
            each = replace(options, threads=threads or len(cpus))
            try:
                return serve(config, open_bundle, options=each, report=handed.on_progress, listener=handed, **how)
            except Exception as error:  # noqa: BLE001 - the supervisor reports it
                failure = failure_of(error)
                handed.on_progress(failure)
                return failure.code

        report(Listening(listener.url, not (listener.local or config.api_keys)))
        try:
            return Supervisor(listener, count, run, started, report, config.shutdown_timeout_s).run()
        finally:
            listener.close()


def _check(count: int, config: ServerConfig, options: EngineOptions) -> int | None:
    """Return the threads of each replica; None: one per CPU."""
    if not hasattr(os, "fork"):
        raise InputError("--replicas: this system has no fork; start one server for each port, behind a load balancer")
    usable = usable_cpus()
    if count > usable:
        raise InputError(
            f"--replicas {count}: this process may use {usable} CPUs, and a replica takes one at least; ask for at "
            f"most {usable}"
        )
    if config.admin_tokens:
        raise InputError("--admin-token: a request would reach one replica of several; with --replicas send SIGHUP")
    if config.record_traffic is not None:
        raise InputError("--record-traffic: one server's file, not for --replicas; leave it out")
    of_quota = max(1, usable // count) if usable < len(allowed_cpus()) else None
    return options.threads or Settings.from_environment().threads_override or of_quota
