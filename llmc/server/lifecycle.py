"""A server's life in one process: bound → loading → ready → draining → stopped.

The socket responds from the start, while a thread loads. The first `stop` refuses new requests and lets accepted ones
end within config.shutdown_timeout_s; the second cancels them with an error. While ready, `reload` replaces the served
bundle (swapping.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import uvicorn

from llmc.platforms import require_names
from llmc.runtime.engine.observer import Observer
from llmc.server.app import Backend
from llmc.server.connections import KEEP_ALIVE_S, UVICORN, bounded_by
from llmc.server.errors import ApiError
from llmc.server.events import Dead, Draining, Listening, OnEvent, Stopped
from llmc.server.loading import OpenBundle, WarmUp
from llmc.server.state import ServerConfig
from llmc.server.swapping import Reopen

if TYPE_CHECKING:
    from llmc.runtime.engine.async_engine import AsyncEngine
    from llmc.runtime.pooling.pooler import AsyncPooler
    from llmc.runtime.startup.opening import EngineOptions
    from llmc.server.listening import Listener
    from llmc.server.state import Served

CLOSING_S = 2
"""Seconds for responses to reach slow clients after all requests have ended."""
ENGINE_STOP_S = 1.0
_LOOK_S = 0.2
_TICK_S = 0.1


require_names("uvicorn", uvicorn.Server, "capture_signals", "main_loop", "on_tick")


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers, which belong to the process; it ends at once when requested."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._reported = asyncio.Event()

    def end(self) -> None:
        """Accept nothing more, and let `serve` return."""
        self.should_exit = True
        self._reported.set()

    async def main_loop(self) -> None:
        """uvicorn's main loop, which ticks every 0.1 s, without waiting for the last tick."""
        ticks = 0
        while not await self.on_tick(ticks):
            ticks = (ticks + 1) % 864_000
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reported.wait(), _TICK_S)

    async def take(self, connection: socket.socket, ended: Callable[[], None]) -> None:
        """Serve a connection that was accepted elsewhere; calls `ended` when it is over."""
        built: Any = self.config.http_protocol_class
        protocol = built(config=self.config, server_state=self.server_state, app_state={})
        protocol.ended = ended
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self.config.ssl)
        except OSError:  # the client has disconnected
            connection.close()
            ended()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """Serves the bundle of `open_bundle` on `listener` until `stop`; `reopen` finds its replacement.

    `observers` watch the engine in addition to the metrics; `report` receives events. `access_log`: log requests to the
    logger "uvicorn.access". `loaded` is called in the loader's thread once everything is loaded.
    """

    def __init__(
        self, config: ServerConfig, listener: Listener, open_bundle: OpenBundle, options: EngineOptions, *,
        warm_up: WarmUp | None = None, observers: Sequence[Observer] = (), report: OnEvent = lambda _: None,
        access_log: bool = False, cache_counters: Callable[[], Mapping[str, int]] | None = None,
        loaded: Callable[[], None] = lambda: None, reopen: Reopen | None = None,
    ) -> None:  # fmt: skip
        self.listener = listener
        self._report, self._loaded = report, loaded
        self._reload: asyncio.Task[None] | None = None
        self._signals: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self.backend = Backend(
            config, open_bundle, options, warm_up=warm_up, observers=observers, report=report,
            cache_counters=cache_counters, stopped=lambda: bool(self._signals), reopen=reopen, settle=loaded,
        )  # fmt: skip
        self.state, self._swapper = self.backend.state, self.backend.swapper
        self.loader = threading.Thread(target=self._load, name="llmc-load", daemon=True)
        self.engine_stopped = True
        app = self.backend.app
        how = uvicorn.Config(
            app, http=bounded_by(self.state.clients), lifespan="off", interface="asgi3", log_config=None,
            log_level="error", access_log=access_log, timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSING_S, ssl_certfile=config.ssl_certfile, ssl_keyfile=config.ssl_keyfile,
            **UVICORN,
        )  # fmt: skip
        if access_log:  # after uvicorn has set the level of both its loggers
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        self._http = _Http(how)

    @property
    def loading(self) -> bool:
        """Whether a thread is still loading or closing a bundle."""
        swapping = self._swapper.thread
        return self.loader.is_alive() or (swapping is not None and swapping.is_alive())

    def reload(self) -> None:
        """Swap in the current bundle from the original source; for any thread or signal handler. Reports an event."""

        def begin() -> None:
            self._reload = asyncio.create_task(self._swap())

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has already ended
                self._loop.call_soon_threadsafe(begin)

    async def _swap(self) -> None:
        with contextlib.suppress(ApiError):
            await self._swapper.swap()

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Drain; the second time, stop without waiting. Returns at once; for any thread or signal handler."""
        self._signals.append(signum)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has already ended
                self._loop.call_soon_threadsafe(self._news.set)

    async def run(self) -> None:
        """Serve until stopped. Raises the loading error after the socket is closed."""
        self._loop = asyncio.get_running_loop()
        http = asyncio.create_task(self._http.serve(list(self.listener.sockets)))
        try:
            await self.listener.begin(self._http.take, self.state)
            self._report(Listening(self.listener.url, not (self.listener.local or self.state.config.api_keys)))
            self.loader.start()
            await self._serve(http)
            cancelled, began = await self._drain()
        finally:
            self._http.end()
            await asyncio.wait([http])
            self.listener.close()
        http.result()
        if self.state.load_error is not None:
            raise self.state.load_error
        for served in self._open:
            self.engine_stopped &= await asyncio.to_thread(served.close, ENGINE_STOP_S)
        self._report(Stopped(cancelled, time.monotonic() - began))

    @property
    def _open(self) -> list[Served]:
        return [served for served in (self.state.served, self._swapper.retiring) if served is not None]

    async def _serve(self, http: asyncio.Task[None]) -> None:
        """Wait for a signal, a loading error or the end of the HTTP server; report if the engine dies."""
        reported = None
        while not (self._signals or self.state.load_error or http.done()):
            engine = None if self.state.served is None else self.state.served.engine
            if engine is not None and engine.error is not None and engine is not reported:
                reported = engine
                self._report(Dead(f"{type(engine.error).__name__}: {engine.error}"))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _LOOK_S)
            self._news.clear()

    async def _drain(self) -> tuple[int, float]:
        """Let accepted requests end; return the number of cancelled ones and the start time."""
        began = time.monotonic()
        self.state.draining = True
        stats, engines = self._swapper.stats, [served.engine for served in self._open]
        if not self._signals or stats is None:
            return 0, began
        timeout = self.state.config.shutdown_timeout_s
        self._report(Draining(signal.Signals(self._signals[0]).name, stats.running, stats.waiting, timeout))
        draining = asyncio.create_task(_drained(engines, timeout))
        while not draining.done() and len(self._signals) < 2:
            news = asyncio.create_task(self._news.wait())
            await asyncio.wait({draining, news}, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            self._news.clear()
        if not draining.done():
            draining.cancel()
            await asyncio.wait([draining])
            return await _drained(engines, 0), began
        return draining.result(), began

    def _load(self) -> None:
        if not self.backend.load():
            return
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._news.set)
        self.backend.prepare()
        self._loaded()


async def _drained(engines: Sequence[AsyncEngine | AsyncPooler], timeout_s: float) -> int:
    return sum(await asyncio.gather(*(engine.drain(timeout_s) for engine in engines)))
