"""A server's life in one process: bound → loading → ready → draining → stopped.

The socket answers from the first moment; a thread loads meanwhile. The first `stop` refuses new requests and lets the
accepted ones end, for at most config.shutdown_timeout_s; the second cancels them, and their callers get an error.
While it is ready, `reload` puts another bundle in the place of what is served (swapping.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import uvicorn

from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.observer import Observer, Observers
from llmc.server.app import build_app
from llmc.server.connections import bounded_by
from llmc.server.errors import ApiError
from llmc.server.events import Dead, Draining, Listening, Ready, Report, Stopped, WarmAside
from llmc.server.loading import Loaded, OpenBundle, StoppedLoadingError, load, read_grammars
from llmc.server.state import Progress, ServerConfig, ServerState
from llmc.server.swapping import Reopen, Swapper
from llmc.server.telemetry.metrics import Metrics
from llmc.server.telemetry.snapshot import Snapshot
from llmc.server.warming import WarmUp, aside

if TYPE_CHECKING:
    from llmc.runtime.engine.async_engine import AsyncEngine
    from llmc.runtime.pooling.async_pooler import AsyncPooler
    from llmc.runtime.startup.opening import EngineOptions
    from llmc.server.listening import Listener
    from llmc.server.state import Served

KEEP_ALIVE_S = 75
"""Seconds that an idle connection is kept: longer than usual proxies keep theirs, so that they close first."""
CLOSING_S = 2
"""Seconds that answers may take to reach slow clients when all requests are over."""
ENGINE_STOP_S = 1.0
_LOOK_S = 0.2
_TICK_S = 0.1


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers, which are the process's matter; it ends at once when told to."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()

    def end(self) -> None:
        """Accept nothing more, and let `serve` return."""
        self.should_exit = True
        self._told.set()

    async def main_loop(self) -> None:
        """uvicorn's, whose ticks are a tenth of a second apart, without the wait for the last one."""
        ticks = 0
        while not await self.on_tick(ticks):
            ticks = (ticks + 1) % 864_000
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), _TICK_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


class Server:
    """Serves what `open_bundle` gives on `listener`, until `stop`; `reopen` finds what is served in its place.

    `observers` watch the engine besides the metrics; `report` hears of events. `access_log` logs requests to the
    logger "uvicorn.access". `loaded` is called in the loader's thread once everything is read.
    """

    def __init__(
        self, config: ServerConfig, listener: Listener, open_bundle: OpenBundle, options: EngineOptions, *,
        warm_up: WarmUp | None = None, observers: Sequence[Observer] = (), report: Report = lambda _: None,
        access_log: bool = False, cache_counters: Callable[[], Mapping[str, int]] | None = None,
        loaded: Callable[[], None] = lambda: None, reopen: Reopen | None = None,
    ) -> None:  # fmt: skip
        metrics, snapshot = Metrics(), Snapshot()
        self.state = ServerState(config, metrics, snapshot)
        self.listener = listener
        self._open_bundle, self._options, self._warm_up = open_bundle, options, warm_up or WarmUp()
        self._report, self._loaded = report, loaded
        self._cache_counters = cache_counters
        self._observer = Observers([metrics, snapshot, *observers])
        self._swapper = Swapper(
            self.state, reopen or (lambda _, tell: open_bundle(tell)), self._load_beside, self._begin, report, loaded
        )
        self.state.swap = self._swapper.swap
        self._reload: asyncio.Task[None] | None = None
        self._signals: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._began = time.monotonic()
        self.loader = threading.Thread(target=self._load, name="llmc-load", daemon=True)
        self.engine_stopped = True
        app = _ClosesWhenDraining(build_app(self.state), self.state)
        how = uvicorn.Config(
            app, http=bounded_by(self.state.clients), ws="none", lifespan="off", interface="asgi3", log_config=None,
            log_level="error", access_log=access_log, server_header=False, proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=CLOSING_S,
        )  # fmt: skip
        if access_log:  # after uvicorn set the level of both its loggers
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        self._http = _Http(how)

    @property
    def loading(self) -> bool:
        """Whether a thread still loads, or closes, a bundle."""
        swapping = self._swapper.thread
        return self.loader.is_alive() or (swapping is not None and swapping.is_alive())

    def reload(self) -> None:
        """Swap in what is now where the served bundle came from; from any thread, or a signal handler. What becomes of
        it is reported."""

        def begin() -> None:
            self._reload = asyncio.create_task(self._swap())

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has already ended
                self._loop.call_soon_threadsafe(begin)

    async def _swap(self) -> None:
        with contextlib.suppress(ApiError):
            await self._swapper.swap()

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Drain, or, the second time, stop without waiting. From any thread, or a signal handler; returns at once."""
        self._signals.append(signum)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has already ended
                self._loop.call_soon_threadsafe(self._news.set)

    async def run(self) -> None:
        """Serve until stopped. Raises what loading raised, once the socket is closed."""
        self._loop = asyncio.get_running_loop()
        http = asyncio.create_task(self._http.serve([self.listener.socket]))
        try:
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
        """What is served, and what was before and is still used."""
        return [served for served in (self.state.served, self._swapper.retiring) if served is not None]

    async def _serve(self, http: asyncio.Task[None]) -> None:
        """Until a signal came, loading failed or the HTTP server ended; tells when the engine dies."""
        told = None
        while not (self._signals or self.state.load_error or http.done()):
            engine = None if self.state.served is None else self.state.served.engine
            if engine is not None and engine.error is not None and engine is not told:
                told = engine
                self._report(Dead(f"{type(engine.error).__name__}: {engine.error}"))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _LOOK_S)
            self._news.clear()

    async def _drain(self) -> tuple[int, float]:
        """Let accepted requests end; how many were cancelled, and when it began."""
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
        """In the loader's thread."""
        try:
            loaded = load(self._open_bundle, self.state.config, self._options, self._warm_up, self._progress)
        except StoppedLoadingError:
            return
        except BaseException as e:  # noqa: BLE001 - the server's thread raises it
            self.state.load_error = e
        else:
            if self._signals:  # nobody waits for it any more
                loaded.served.close()
                return
            self._begin(loaded)
            served, seconds = loaded.served, time.monotonic() - self._began
            device = served.bundle.manifest.device
            self._report(Ready(served.model_name, device, seconds, loaded.warm.buckets, loaded.compilations))
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._news.set)
        if self.state.served is not None:
            read_grammars(self.state.served, self.state.config)
        self._loaded()

    def _load_beside(self, bundle: Bundle, tell: Callable[[Progress], None]) -> Loaded:
        """In the swapper's thread: another bundle, as at the start, which nothing observes yet."""
        loaded = load(lambda _: bundle, self.state.config, self._options, self._warm_up, tell)
        read_grammars(loaded.served, self.state.config)
        return loaded

    def _progress(self, progress: Progress) -> None:
        if self._signals:
            raise StoppedLoadingError
        self.state.progress = progress
        self._report(progress)

    def _progress_aside(self, progress: Progress) -> None:
        """In the engine's thread, as the next."""
        self.state.aside = progress

    def _warm_aside(self, event: WarmAside) -> None:
        self.state.aside = None
        self._report(event)

    def _begin(self, loaded: Loaded) -> None:
        """Let requests go to it."""
        served = loaded.served
        pooler, manifest = served.pooler, served.bundle.manifest
        plan = served.bundle.plan if pooler is None else None
        self.state.metrics.bind(
            served.model_name, lambda: self._swapper.stats, self._cache_counters, plan, manifest.device, loaded.origin,
            manifest.digest,
        )  # fmt: skip
        if plan is not None:
            self.state.snapshot.bind(plan)
        if pooler is not None:
            self.state.metrics.bind_pooling(lambda: pooler.pooler.statistics)
        else:
            served.generating.generator.observer = self._observer
        self.state.served = served
        if loaded.warm.aside is not None:
            executor = served.generating.generator.engine.executor
            served.generating.work_between(aside(executor, loaded.warm.aside, self._progress_aside, self._warm_aside))


async def _drained(engines: Sequence[AsyncEngine | AsyncPooler], timeout_s: float) -> int:
    return sum(await asyncio.gather(*(engine.drain(timeout_s) for engine in engines)))


class _ClosesWhenDraining:
    """ASGI: answers that begin while the server drains end their connection, so that clients go elsewhere."""

    def __init__(self, app: Any, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Pass on, adding `connection: close`."""

        async def closing(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and self._state.draining:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, closing)
