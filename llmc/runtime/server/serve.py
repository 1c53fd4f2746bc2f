"""`serve`: a server as a process of its own, with signals, a watchdog and an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from llmc.runtime.opening import EngineOptions
from llmc.runtime.server.events import Report
from llmc.runtime.server.lifecycle import Server
from llmc.runtime.server.listening import listen, listen_unix
from llmc.runtime.server.loading import OpenBundle
from llmc.runtime.server.state import ServerConfig
from llmc.runtime.server.watchdog import Watchdog, end

if TYPE_CHECKING:
    from llmc.runtime.server.warming import WarmUp
    from llmc.runtime.telemetry.chrome_trace import ChromeTrace
    from llmc.runtime.telemetry.recorder import TrafficRecorder

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SWITCH_INTERVAL_S = 0.0005
"""How long the engine's thread may keep the interpreter from the event loop's, and the other way round."""


def serve(
    config: ServerConfig, open_bundle: OpenBundle, *, options: EngineOptions | None = None,
    warm_up: WarmUp = "all", report: Report = lambda _: None, uds: Path | None = None, access_log: bool = False,
    cache_counters: Callable[[], Mapping[str, int]] | None = None,
) -> int:  # fmt: skip
    """Serve until SIGTERM or SIGINT; the exit code: 0, or 128 + the signal where a second one cut requests short.

    Listens on `config.host`:`config.port`, or the Unix socket `uds`. `cache_counters`: hits, misses and corrupt of the
    artifact store, for the metrics. To be called in the main thread, once in a
    process: it may end the process itself where something hangs. Raises InputError where the socket cannot be bound,
    and what `open_bundle` or loading raises.
    """
    listener = listen(config.host, config.port) if uds is None else listen_unix(uds)
    with contextlib.ExitStack() as closing:
        closing.callback(listener.close)
        if access_log:
            _log_accesses()
        observers = [closing.enter_context(contextlib.closing(o)) for o in _recorders(config)]
        server = Server(
            config, listener, open_bundle, options or EngineOptions(), warm_up=warm_up, observers=observers,
            report=report, access_log=access_log, cache_counters=cache_counters,
        )  # fmt: skip
        watchdog = Watchdog(config.shutdown_timeout_s)
        signals: list[int] = []

        def stop(signum: int, frame: FrameType | None) -> None:
            del frame
            signals.append(signum)
            watchdog.signalled(signum)
            server.stop(signum)

        closing.enter_context(_handled(stop))
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        watchdog.start()
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(server.run())
    code = 0 if len(signals) < 2 else 128 + signals[1]
    if server.loader.is_alive() or not server.engine_stopped or multiprocessing.active_children():
        end(code)
    watchdog.dismiss()
    return code


def _recorders(config: ServerConfig) -> Iterator[TrafficRecorder | ChromeTrace]:
    if config.record_traffic is not None:
        from llmc.runtime.telemetry.recorder import TrafficRecorder

        yield TrafficRecorder(config.record_traffic)
    if config.profile is not None:
        from llmc.runtime.telemetry.chrome_trace import ChromeTrace

        yield ChromeTrace(config.profile)


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """`handler` gets SIGNALS, until the end."""
    before = {signum: signal.signal(signum, handler) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, previous in before.items():
            signal.signal(signum, previous)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where it is installed, else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _log_accesses() -> None:
    logger = logging.getLogger("uvicorn.access")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
