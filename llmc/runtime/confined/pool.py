"""Run jobs in the children of one nursery, from blocking and from asyncio code."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

from llmc.errors import InputError, LlmcError, OverloadedError
from llmc.runtime.confined import frames
from llmc.runtime.confined.limits import ChildLimits

T = TypeVar("T")
Limit = Literal["time", "memory", "stack"]
_RUN = "import sys; sys.path[:] = {path!r}; from llmc.runtime.confined.nursery import main; main({control}, {config})"
_BY_SIGNAL: dict[int, Limit] = {
    signal.SIGPROF: "time", signal.SIGXCPU: "time", signal.SIGSEGV: "stack", signal.SIGBUS: "stack",
    signal.SIGABRT: "memory", signal.SIGKILL: "memory",
}  # fmt: skip
_ROOT = str(Path(__file__).parents[3])
"""Folder of the package llmc: an editable install uses an import hook, not sys.path, and a nursery has no hooks."""
_END_S = 2.0
_RETRY_S = 1.0


class LimitError(InputError):
    """A job exceeded a limit of its child; `limit` says which."""

    def __init__(self, limit: Limit, limits: ChildLimits) -> None:
        self.limit = limit
        super().__init__(
            {
                "time": f"it takes more than {limits.seconds:g} s of processor time",
                "memory": f"it takes more than {limits.memory_bytes >> 20} MiB of memory",
                "stack": f"it is nested or chained too deeply for a stack of {limits.stack_bytes >> 20} MiB",
            }[limit]
        )


class JobError(LlmcError):
    """A job failed, but not because of its input or a limit."""


class ChildJob:
    """The value of a job, and the bytes that its child grew by."""

    def __init__(self, value: Any, size: int) -> None:
        self.value = value
        self.size = size


class ChildPool:
    """Children that run `work` ("module:factory", called once in the nursery with the JSON value `options`).

    `run` and `arun` take JSON (not null) and return JSON. They raise InputError from `work`, LimitError, JobError, and
    OverloadedError if more than limits.waiting jobs wait. After a child is killed, the next job takes some milliseconds
    more. `run` is thread-safe; `arun` needs one event loop, and cancelling it kills its child. `start` or the first job
    starts the nursery; it ends with `close` or with this process.
    """

    def __init__(self, work: str, options: Mapping[str, Any], limits: ChildLimits, *, niceness: int = 0) -> None:
        self.limits = limits
        self._config = {"work": work, "options": dict(options), "niceness": niceness, **asdict(limits)}
        self._lock = threading.Lock()
        self._nursery: _Nursery | None = None
        self._idle: list[_Child] = []
        self._busy = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self._forget = weakref.finalize(self, _close, self._idle)

    def start(self) -> None:
        """Start the nursery unless it runs. Returns after a few milliseconds, before the nursery is ready."""
        with self._lock:
            self._started()

    def _started(self) -> _Nursery:
        if self._closed:
            raise JobError("the pool of child processes is closed")
        if self._nursery is None or not self._nursery.alive:
            if self._nursery is not None:
                self._nursery.close()
            try:
                self._nursery = _Nursery(self._config)
            except OSError as error:
                raise OverloadedError(f"no process could be started ({error.strerror}); try again later") from error
        return self._nursery

    def close(self) -> None:
        """End the nursery and its children; running jobs fail."""
        with self._lock:
            self._closed = True
            nursery, self._nursery = self._nursery, None
            self._forget()
        if nursery is not None:
            nursery.close()

    @property
    def pid(self) -> int | None:
        """PID of the nursery, or None."""
        return None if self._nursery is None else self._nursery.pid

    def _take(self, fresh: bool) -> _Child:
        with self._lock:
            while self._idle and not fresh:
                child = self._idle.pop()
                if child.usable:
                    return child
                child.close()
            return self._started().child()

    def _keep(self, child: _Child, answer: Mapping[str, Any] | None) -> None:
        """Keep a child that has answered for further jobs; end any other."""
        with self._lock:
            lasts = answer is not None and not answer.get("last", True)
            if lasts and not self._closed and len(self._idle) < self.limits.workers:
                self._idle.append(child)
                return
        child.close()

    def run(self, job: Any) -> ChildJob:
        """Run a job and block until it is done."""
        return _finished(self._done(frames.pack(job), _blocking))

    async def arun(self, job: Any, then: Callable[[ChildJob], Awaitable[T]]) -> T:
        """Like `run`, on an event loop: return the result of `then`, and keep the worker slot until then."""
        async with _Turn(self):
            if frames.is_large(job):
                request = await asyncio.get_running_loop().run_in_executor(None, frames.pack, job)
            else:
                request = frames.pack(job)
            return await then(await self._done(request, _on_loop))

    async def _done(self, request: bytes, exchange: _Exchange) -> ChildJob:
        answer = await self._attempt(request, exchange) or await self._attempt(request, exchange, fresh=True)
        return self._reported(answer)

    async def _attempt(self, request: bytes, exchange: _Exchange, fresh: bool = False) -> dict[str, Any] | None:
        """Return the answer; None if the nursery or an idle child ended meanwhile, which cannot happen with a fresh
        child.
        """
        child, answer = self._take(fresh), None
        try:
            answer = await exchange(child.connection, request, self.limits.patience_s)
        except TimeoutError:
            raise LimitError("time", self.limits) from None
        except OSError:
            pass
        finally:
            self._keep(child, answer)
        return answer

    def _reported(self, answer: dict[str, Any] | None) -> ChildJob:
        if answer is None:
            raise JobError("the child process ended without an answer; its parent has ended or could not start")
        if "done" in answer:
            return ChildJob(answer["done"], answer.get("bytes", 0))
        if "refused" in answer:
            raise InputError(answer["refused"])
        limit = answer.get("limit") or _BY_SIGNAL.get(answer.get("killed", 0))
        if limit is not None:
            raise LimitError(limit, self.limits)
        raise JobError(str(answer.get("failed") or f"the child process ended by signal {answer.get('killed')}"))


class _Turn:
    """One of the pool's worker slots, in order of arrival."""

    def __init__(self, pool: ChildPool) -> None:
        self._pool = pool

    async def __aenter__(self) -> None:
        pool = self._pool
        if pool._busy < pool.limits.workers:
            pool._busy += 1
            return
        if len(pool._queue) >= pool.limits.waiting:
            raise OverloadedError(
                f"{len(pool._queue)} requests wait for one of {pool.limits.workers} child processes; try again later",
                _RETRY_S,
            )
        turn = asyncio.get_running_loop().create_future()
        pool._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # this job already had the slot
                self._free()
            else:
                with contextlib.suppress(ValueError):
                    pool._queue.remove(turn)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._free()

    def _free(self) -> None:
        pool = self._pool
        while pool._queue:
            turn = pool._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        pool._busy -= 1


class _Child:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    @property
    def usable(self) -> bool:
        """Whether it waits for a job: its socket has neither data nor the end of the stream."""
        self.connection.setblocking(False)
        try:
            self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        self.connection.close()


class _Nursery:
    def __init__(self, config: Mapping[str, Any]) -> None:
        control, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as file:
            file.write(frames.pack(config))
            file.seek(0)
            fds = (theirs.fileno(), file.fileno())
            path = list(dict.fromkeys([*(str(Path(entry).absolute()) for entry in sys.path), _ROOT]))
            self._process = subprocess.Popen(
                [sys.executable, "-E", "-s", "-S", "-c", _RUN.format(path=path, control=fds[0], config=fds[1])],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=fds,
                start_new_session=True,
            )  # fmt: skip
        self._control = control
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _end, self._process, control)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def child(self) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):  # the nursery has ended, so the child's socket is closed too
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        return _Child(ours)

    def close(self) -> None:
        self._end()


def _close(children: list[_Child]) -> None:
    while children:
        children.pop().close()


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_Exchange = Callable[[socket.socket, bytes, float], Awaitable[Any]]
"""Sends a frame and returns the answer's value, None at the end. Raises TimeoutError after the given seconds, or
OSError.
"""


async def _blocking(connection: socket.socket, request: bytes, patience_s: float) -> Any:
    """Exchange for blocking callers; never suspends."""
    connection.settimeout(patience_s)
    connection.sendall(request)
    return frames.read(connection)


async def _on_loop(connection: socket.socket, request: bytes, patience_s: float) -> Any:
    connection.setblocking(False)
    async with asyncio.timeout(patience_s):
        loop, frame = asyncio.get_running_loop(), frames.Frame()
        await loop.sock_sendall(connection, request)
        with contextlib.suppress(EOFError):
            while wanted := frame.wants:
                frame.take(await loop.sock_recv(connection, wanted))
            return frame.value
    return None


def _finished(work: Coroutine[Any, Any, T]) -> T:
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise RuntimeError("it was suspended")
