"""The pages of /dashboard and /metrics on a real socket, over a state that a test makes up."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any

import uvicorn
from fastapi import FastAPI

from llmc.runtime.engine.observer import EngineStats
from llmc.server.clients import RequireKey
from llmc.server.routes import status
from llmc.server.state import Progress, Served, ServerConfig, ServerState
from llmc.server.telemetry.metrics import Metrics
from llmc.server.telemetry.snapshot import Snapshot
from llmc.testing.toy import toy_plan
from tests.server.telemetry.samples import step, summary
from tests.timing import PATIENCE_S


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Invented:
    """A server's state: loading, until `serve` is called. `load` lets seconds pass in which requests are served."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.state = ServerState(ServerConfig(), Metrics(), Snapshot(self.clock))
        self.engine = SimpleNamespace(stats=EngineStats(2, 1, 4, 1, 0.375, 10, 0), error=None)

    def loading(self, progress: Progress) -> None:
        self.state.progress = progress

    def serve(self, model_name: str = "toy", plan: Any = None) -> None:
        plan = plan or toy_plan()
        bundle = SimpleNamespace(plan=plan, task="generate", manifest=SimpleNamespace(device="fake"))
        self.state.metrics.bind(model_name, lambda: self.engine.stats, plan=plan, device="fake")
        self.state.snapshot.bind(plan)
        self.state.served = Served(bundle, self.engine, None, None, None, model_name)  # type: ignore[arg-type]

    def compiled(self, times: int) -> None:
        self.engine.stats = EngineStats(2, 1, 4, 1, 0.375, 10, times)

    def load(self, seconds: int = 1) -> None:
        """Each second: a prompt of 9 tokens in a bucket of 16, two decode steps of 3 rows in one of 4."""
        watching = (self.state.metrics, self.state.snapshot)
        for second in range(seconds):
            for observer in watching:
                observer.arrived(str(second), 9)
                observer.admitted(str(second), 0.01, 0)
                observer.stepped(step("prompt", 1, 16, 0, live_rows=1, live_tokens=9, padding_tokens=7))
                observer.emitted([0.05], [])
                for _ in range(2):
                    observer.stepped(step(context=16))
                    observer.emitted([], [0.01] * 3)
                observer.finished(summary(str(second)))
            self.clock.now += 1

    def app(self, keys: Callable[[], tuple[str, ...]] = tuple) -> Any:
        """The status routes, behind `keys` where there are any."""
        app = FastAPI(openapi_url=None)
        app.state.llmc = self.state
        app.include_router(status.router)

        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            await (RequireKey(app, keys()) if keys() else app)(scope, receive, send)

        return guarded


class Site:
    """An application on 127.0.0.1, in a thread."""

    def __init__(self, app: Any) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(app, lifespan="off", log_level="critical", ws="none", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._socket])))

    def __enter__(self) -> Site:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Answer no more."""
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        self._socket.close()
