"""`serve`: a server in its own process, with signals, a watchdog and an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

from llmc.runtime.heap import settle, share_heap
from llmc.runtime.startup.opening import EngineOptions
from llmc.server.events import OnEvent
from llmc.server.lifecycle import Server
from llmc.server.listening import Listener, listen, listen_unix, require_certificate
from llmc.server.loading import OpenBundle
from llmc.server.state import ServerConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmc.server.loading import WarmUp
    from llmc.server.swapping import Reopen
    from llmc.server.telemetry.requests import RequestSpans, TrafficRecorder


def nothing(signum: int, frame: Any) -> None:
    """Handle a signal that is read from the bell."""


@contextmanager
def bell(signals: Iterable[int]) -> Iterator[socket.socket]:
    """Open a socket that receives the number of each handled signal as a byte; `signals` get the handler `nothing`.

    The C-level handler writes the byte. A thread that waits for a lock instead would miss a signal that arrives as the
    wait begins, until the next one. For the main thread.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        woken = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        before = {signum: signal.signal(signum, nothing) for signum in signals}
        try:
            yield ours
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(woken)


GRACE_S = 10.0
"""Extra seconds for cancelled requests, slow clients and closing."""
HURRY_S = 2.0
"""Seconds after a second signal."""


class Watchdog:
    """Ends the process timeout_s + GRACE_S after the first signal, HURRY_S after the second, at once at the third."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()  # SimpleQueue.put is safe in a signal handler
        self._thread = threading.Thread(target=self._watch, name="llmc-watchdog", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def signalled(self, signum: int) -> None:
        """Record a signal; callable from a signal handler."""
        self._signals.put(signum)

    def dismiss(self) -> None:
        """Stop watching: the process stopped normally."""
        self._signals.put(0)

    def _watch(self) -> None:
        allowed = (self._timeout_s + GRACE_S, HURRY_S, 0.0)
        signum, deadline = self._signals.get(), 0.0
        for seconds in allowed:
            if not signum:
                return
            code = 128 + signum
            now = time.monotonic()
            deadline = min(deadline or now + seconds, now + seconds)
            try:
                signum = self._signals.get(timeout=max(0.0, deadline - now))
            except queue.Empty:
                break
        os.write(2, b"llmc: the server did not stop in time and was ended; requests were cut\n")
        end(code)


def end(code: int) -> NoReturn:
    """Exit now, whatever other threads do, and kill child processes."""
    for child in multiprocessing.active_children():
        child.kill()
        child.join(HURRY_S)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


_HANGUP = getattr(signal, "SIGHUP", None)  # Windows lacks it, and those of IGNORED
SIGNALS = (signal.SIGTERM, signal.SIGINT, *([] if _HANGUP is None else [_HANGUP]))
"""SIGTERM and SIGINT let running requests end. SIGHUP reads the bundle again.

If its terminal is gone, SIGHUP ends the server like SIGTERM; if it was ignored at the process's start (nohup), it does
nothing.
"""
IGNORED = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
"""Signals that tools send to reopen logs or dump state; the server has nothing to do and must not end."""
FILES = 512
"""Files that the process may open in addition to its connections."""
SWITCH_INTERVAL_S = 0.0005
"""Seconds that one of the engine's and the event loop's threads may hold the interpreter while the other waits."""


def serve(
    config: ServerConfig, open_bundle: OpenBundle, *, options: EngineOptions | None = None,
    warm_up: WarmUp | None = None, report: OnEvent = lambda _: None, uds: Path | None = None, access_log: bool = False,
    cache_counters: Callable[[], Mapping[str, int]] | None = None, reopen: Reopen | None = None,
    listener: Listener | None = None,
) -> int:  # fmt: skip
    """Serve until a signal; return the exit code: 0, or 128 + the signal if a second one cut requests short.

    Connections come from `listener`, the Unix socket `uds`, or `config.host`:`config.port`. `cache_counters`: hits,
    misses and corrupt entries of the artifact store, for the metrics. `reopen` finds the bundle for SIGHUP or POST
    /admin/bundle.

    Call it in the main thread, once per process: it may end the process if something hangs. Raises InputError if the
    socket cannot be bound, and errors of `open_bundle` and of loading.
    """
    listener = listener or listen_at(config, uds)
    with contextlib.ExitStack() as closing:
        closing.callback(listener.close)
        share_heap()
        _allow_files(config.max_connections + FILES)
        if access_log:
            _log_accesses((*config.api_keys, *config.admin_tokens))
        observers = [closing.enter_context(contextlib.closing(o)) for o in _recorders(config)]
        server = Server(
            config, listener, open_bundle, options or EngineOptions(), warm_up=warm_up, observers=observers,
            report=report, access_log=access_log, cache_counters=cache_counters, loaded=settle,
            reopen=reopen,
        )  # fmt: skip
        watchdog = Watchdog(config.shutdown_timeout_s)
        signals: list[int] = []
        swaps = means_swap()

        def stop(signum: int, frame: FrameType | None) -> None:
            del frame
            if swaps(signum):
                server.reload()
                return
            signals.append(signum)
            watchdog.signalled(signum)
            server.stop(signum)

        closing.enter_context(handled(stop))
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        watchdog.start()
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(server.run())
    code = 0 if len(signals) < 2 else 128 + signals[1]
    if server.loading or not server.engine_stopped or multiprocessing.active_children():
        end(code)
    watchdog.dismiss()
    return code


def listen_at(config: ServerConfig, uds: Path | None) -> Listener:
    """Listen at the address that `serve` uses. Raises InputError if it or the certificate cannot be used."""
    scheme = "https" if require_certificate(config.ssl_certfile, config.ssl_keyfile) else "http"
    return listen(config.host, config.port, scheme) if uds is None else listen_unix(uds)


def means_swap() -> Callable[[int], bool]:
    """Return a test whether a signal requests a swap: SIGHUP, unless a terminal that is open now has gone."""
    terminals = [fd for fd in range(3) if os.isatty(fd)]
    return lambda signum: signum == _HANGUP and all(map(os.isatty, terminals))


def _recorders(config: ServerConfig) -> Iterator[TrafficRecorder | RequestSpans]:
    if config.record_traffic is not None:
        from llmc.server.telemetry.requests import TrafficRecorder

        yield TrafficRecorder(config.record_traffic)
    if config.otlp_traces_endpoint is not None:
        from llmc.server.telemetry.requests import RequestSpans

        yield RequestSpans(config.otlp_traces_endpoint)


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install `handler` for SIGNALS and ignore IGNORED, until the end of the block."""
    wanted = [s for s in SIGNALS if s != _HANGUP or signal.getsignal(s) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, handler) for signum in wanted}
    before |= {signum: signal.signal(signum, signal.SIG_IGN) for signum in IGNORED}
    try:
        yield
    finally:
        for signum, previous in before.items():
            signal.signal(signum, previous)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _allow_files(count: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _log_accesses(keys: Sequence[str]) -> None:
    """Without URL queries and API keys."""

    def plain(record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(_plain(arg, keys) if isinstance(arg, str) else arg for arg in record.args)
        return True

    logger = logging.getLogger("uvicorn.access")
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(plain)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False


def _plain(text: str, keys: Sequence[str]) -> str:
    path = text.partition("?")[0]
    for key in keys:
        for spelling in (key, quote(key), quote(key, safe="")):
            path = path.replace(spelling, "***")
    return path
