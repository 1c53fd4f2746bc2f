"""The parent process of all children. It imports and reads everything in advance, so children fork in a millisecond and
share memory.

To request a child, the pool sends one byte on `control` with the child's end of a socket. The nursery keeps a copy of
this end. It kills the child when the other end is closed, and sends a message on the socket when a signal ended the
child. When `control` is closed, the requesting process has ended: the nursery kills its children and exits. If the
nursery is killed, the kernel kills the children.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmc.errors import InputError
from llmc.runtime.confined import frames
from llmc.runtime.heap import settle, share_heap, trim

WORN_BYTES = 8 << 20
"""A child exits after a job if it then holds this many bytes more than at its start, even after freeing memory."""
GROWN_BYTES = 1 << 20
"""A child that grew by more than this many bytes in a job then returns memory to the system."""
_PR_SET_PDEATHSIG = 1
_STOPPING = tuple(getattr(signal, name) for name in ("SIGPROF", "SIGABRT", "SIGBUS", "SIGSEGV", "SIGTERM", "SIGXCPU"))
"""Signals that end a child, including those of its limits.

Libraries in the requesting process may ignore or block a signal, as libtpu does with SIGPROF, and children inherit
this.
"""

Work = Callable[[Any], Any]
"""Runs one job: JSON to JSON. Raises InputError for a job that cannot be done."""


@dataclass(frozen=True)
class _Child:
    pid: int
    connection: socket.socket
    lasts: bool


def main(control_fd: int, config_fd: int) -> None:
    """Serve until `control` ends. The config is a frame: {"work": "module:factory", "options", "seconds", …}."""
    share_heap()
    control = socket.socket(fileno=control_fd)
    with open(config_fd, "rb") as file:
        config = frames.unpack(file.read())
    with contextlib.suppress(OSError):
        os.nice(config["niceness"])  # before imports and reads, which may take a second
    module, _, factory = config["work"].partition(":")
    make = getattr(importlib.import_module(module), factory)
    with _bounded(config):
        work: Work = make(**config["options"])
    settle()
    _Nursery(control, work, config).run()


@contextlib.contextmanager
def _bounded(config: Mapping[str, Any]) -> Iterator[None]:
    """Apply the limits of one job to shared preparation; this process dies if it exceeds them."""
    _Memory().bound(config["memory_bytes"], lasting=False)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, config["seconds"])
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (resource.getrlimit(resource.RLIMIT_DATA)[1],) * 2)


class _Nursery:
    def __init__(self, control: socket.socket, work: Work, config: Mapping[str, Any]) -> None:
        self._control = control
        self._work = work
        self._config = config
        self._children: dict[int, _Child] = {}
        self._bell, ring = socket.socketpair()
        ring.setblocking(False)
        self._ring = ring
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(ring.fileno(), warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(self._bell, select.POLLIN)

    def run(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._bell.fileno():
                    self._bell.recv(4096)
                    self._reap()
                elif fd != self._control.fileno():
                    child = self._children.get(fd)
                    if child is not None:  # no caller waits for it any more
                        os.kill(child.pid, signal.SIGKILL)
                        self._poll.unregister(fd)
                elif not self._admit():
                    self._end()
                    return

    def _end(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
        for child in self._children.values():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, 0)

    def _admit(self) -> bool:
        byte, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if not byte:
            return False
        for fd in fds:
            connection = socket.socket(fileno=fd)
            lasts = not any(child.lasts for child in self._children.values())
            try:
                pid = os.fork()
            except OSError as error:
                _report(connection, {"failed": f"no process could be started: {error.strerror}"})
                connection.close()
                continue
            if pid == 0:
                self._become_child(connection, lasts)
            self._children[fd] = _Child(pid, connection, lasts)
            self._poll.register(fd, 0)  # hang-up is reported without a mask
        return True

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for fd, child in list(self._children.items()):
                if child.pid == pid:
                    del self._children[fd]
                    with contextlib.suppress(KeyError):
                        self._poll.unregister(fd)
                    if os.WIFSIGNALED(status):
                        _report(child.connection, {"killed": os.WTERMSIG(status)})
                    child.connection.close()

    def _become_child(self, connection: socket.socket, lasts: bool) -> None:
        try:
            parent = os.getppid()
            signal.set_wakeup_fd(-1)
            for signum in (signal.SIGCHLD, *_STOPPING):
                signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            _die_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            for other in (self._control, self._bell, self._ring, *(c.connection for c in self._children.values())):
                other.close()
            threading.stack_size(self._config["stack_bytes"])
            thread = threading.Thread(target=_serve, args=(connection, self._work, self._config, lasts))
            thread.start()
            thread.join()
        finally:
            os._exit(0)


def _serve(connection: socket.socket, work: Work, config: Mapping[str, Any], lasts: bool) -> None:
    """Run jobs until the socket closes, or until idle if another child `lasts`.

    Runs in a thread whose stack size is the job limit.
    """
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory = _Memory()
    memory.bound(config["memory_bytes"])
    began = now = memory.resident
    idle_s = None if lasts else config["idle_s"]
    while select.select([connection], [], [], idle_s)[0] and (job := frames.read(connection)) is not None:
        before = now
        signal.setitimer(signal.ITIMER_PROF, config["seconds"])  # its signal always ends the process
        try:
            answer = {"done": work(job)}
        except InputError as error:
            answer = {"refused": str(error)}
        except MemoryError:
            answer = {"limit": "memory"}
        except RecursionError:
            answer = {"limit": "stack"}
        except BaseException as error:  # noqa: BLE001 - a native panic is not an Exception
            answer = {"failed": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        now = memory.resident
        answer["bytes"] = max(0, now - before)
        if now - before > GROWN_BYTES:
            job = None
            trim()
            now = memory.resident
        worn = now - began > WORN_BYTES or "limit" in answer
        answer["last"] = worn
        _report(connection, answer)
        if worn:
            return


def _report(connection: socket.socket, answer: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(frames.pack(answer))


def _die_with_parent() -> None:
    """Request SIGKILL at the parent's death. Linux only: elsewhere a child ends after its job, at the closed socket."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class _Memory:
    """Memory of this process. Systems without /proc report the peak instead, and have no limit."""

    def __init__(self) -> None:
        self._page = resource.getpagesize()
        self._statm: int | None = None
        with contextlib.suppress(OSError):
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)

    def _pages(self, field: int) -> int | None:
        return None if self._statm is None else int(os.pread(self._statm, 256, 0).split()[field])

    def bound(self, beyond: int, lasting: bool = True) -> None:
        """Limit further mappings to `beyond` bytes; a limit that is not `lasting` can be lifted."""
        data = self._pages(5)
        if data is not None:
            soft = data * self._page + beyond
            with contextlib.suppress(OSError, ValueError):
                hard = soft if lasting else resource.getrlimit(resource.RLIMIT_DATA)[1]
                resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    @property
    def resident(self) -> int:
        pages = self._pages(1)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if pages is None else pages * self._page
