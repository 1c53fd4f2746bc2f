"""A replica as its supervisor sees it: a forked process, its state, its connections, and its reports, one per line.

    line = "-" | {"event": name, field: value, …} | {"error": text, "code": exit code}

"-": a connection has ended. The supervisor sends connections, each with one byte.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from socket import send_fds, socket, socketpair
from typing import TypeAlias

from llmc.errors import LlmcError
from llmc.server import events
from llmc.server.events import Dead, Draining, Event, Ready

UNEXPECTED = 1
"""Exit code of a process that ended on an unexpected error."""
Run = Callable[[socket], int]
"""The work of a replica, given its end of the socket; returns its exit code."""


HANDED = b"+"
ENDED = b"-\n"
_EVENTS = {
    kind.__name__: kind
    for kind in (
        events.Ready, events.WarmAside, events.Swapped, events.SwapRefused, events.Retired, events.Draining,
        events.Dead, events.Stopped,
    )
}  # fmt: skip
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
    end: socket
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

    def give(self, connection: socket) -> bool:
        """Pass a connection on; false if it takes none now."""
        try:
            send_fds(self.end, [HANDED], [connection.fileno()])
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
    ours, theirs = socketpair()
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
