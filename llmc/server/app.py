"""The application: all routes, behind the API key, with one error format, over a bundle that it loads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.observer import Observer, Observers
from llmc.runtime.text.confined_encoding import require_sound
from llmc.server import errors
from llmc.server.clients import OPEN_PATHS, BoundRequests, RequireKey
from llmc.server.events import OnEvent, Ready, WarmAside
from llmc.server.loading import Loaded, OpenBundle, StoppedLoadingError, WarmUp, aside, load, read_grammars
from llmc.server.protocol.requests import ChatRequest, CompletionRequest
from llmc.server.routes import completions, messages, pooling, responses, status, tokenize
from llmc.server.routes.common import HoldServed, document
from llmc.server.routes.messages import CountRequest, MessagesRequest
from llmc.server.routes.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from llmc.server.routes.responses import ResponsesRequest
from llmc.server.routes.tokenize import DetokenizeRequest, TokenizeRequest
from llmc.server.state import Progress, ServerConfig, ServerState
from llmc.server.swapping import Reopen, Swapper
from llmc.server.telemetry.metrics import Metrics
from llmc.server.telemetry.snapshot import Snapshot
from llmc.version import __version__

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig

    from llmc.runtime.startup.opening import EngineOptions


UNROUTED = "none"


class CountAnswers:
    """Counts every response in the metrics by its route template ("none" if no route matched) and its status.

    While the server drains, it also asks for the connection to be closed.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._state.metrics.http(getattr(scope.get("route"), "path", UNROUTED), message["status"])
                if self._state.draining:
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, counted)


BODIES = (
    CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest, CountRequest, TokenizeRequest,
    DetokenizeRequest, EmbeddingRequest, RerankRequest, ScoreRequest,
)  # fmt: skip
_OFF: TelemetryConfig = {
    "tracing": False, "metrics": False, "logs": False, "operation_spans": False, "auto_configure": False,
}  # fmt: skip
"""Turns off FastAPI's telemetry: this server reports at /metrics only, and sends nothing anywhere."""


class AllowOrigins(CORSMiddleware):
    """Answers CORS preflights before the API key is checked, because browsers send none with them."""

    def __init__(self, app: ASGIApp, allow_origins: Sequence[str]) -> None:
        super().__init__(app, allow_origins, allow_methods=("*",), allow_headers=("*",), max_age=3600)

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return 204 for an allowed request; the reason in plain text otherwise."""
        response = super().preflight_response(request_headers)
        if response.status_code != HTTPStatus.OK:
            return response
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return Response(status_code=HTTPStatus.NO_CONTENT, headers=headers)


ROUTERS = tuple(module.router for module in (status, completions, responses, messages, tokenize, pooling))


def build_app(state: ServerState) -> FastAPI:
    """Build the application over `state` (`request.app.state.llmc`). Raises InputError for an empty API key."""
    app = FastAPI(
        title="llmc", version=__version__, description="OpenAI's API over compiled graphs.",
        openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=_OFF,
    )  # fmt: skip
    app.state.llmc = state
    errors.install(app)
    keys, tokens = state.config.api_keys, state.config.admin_tokens
    for router in (*ROUTERS, *([status.admin] if tokens else [])):
        app.include_router(router)
    document(app, BODIES, bool(keys), OPEN_PATHS)
    app.add_middleware(errors.AnswerFaults)
    app.add_middleware(HoldServed)
    app.add_middleware(BoundRequests, clients=state.clients, free=OPEN_PATHS)
    if keys or tokens:
        RequireKey(app, keys, tokens)  # refuses empty keys now; middlewares are built at the first request
        app.add_middleware(RequireKey, keys=keys, admin_tokens=tokens)
    if state.config.allowed_origins:
        app.add_middleware(AllowOrigins, allow_origins=state.config.allowed_origins)
    app.add_middleware(CountAnswers, state=state)
    return app


class Backend:
    """`app` responds from the start; `load` makes it ready, and `swapper` replaces the served bundle.

    `observers` watch the engine in addition to the metrics; `report` receives events. `stopped`: whether the process is
    ending, so that loading should stop. `reopen` finds the replacement of what `open_bundle` returned; `settle` is
    called in a thread after a replaced bundle is closed.
    """

    def __init__(
        self, config: ServerConfig, open_bundle: OpenBundle, options: EngineOptions, *, warm_up: WarmUp | None = None,
        observers: Sequence[Observer] = (), report: OnEvent = lambda _: None,
        cache_counters: Callable[[], Mapping[str, int]] | None = None, stopped: Callable[[], bool] = lambda: False,
        reopen: Reopen | None = None, settle: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        metrics, snapshot = Metrics(), Snapshot()
        self.state = ServerState(config, metrics, snapshot)
        self._open_bundle, self._options, self._warm_up = open_bundle, options, warm_up or WarmUp()
        self._report, self._stopped = report, stopped
        self._cache_counters = cache_counters
        self._observer = Observers([metrics, snapshot, *observers])
        self._began = time.monotonic()
        self.swapper = Swapper(
            self.state,
            reopen or (lambda _, on_progress: open_bundle(on_progress)),
            self._load_beside,
            self._begin,
            report,
            settle,
        )
        self.state.swap = self.swapper.swap
        self.app = build_app(self.state)

    def load(self) -> bool:
        """Open, warm up and serve; false if loading was stopped. Errors become the state's `load_error`."""
        try:
            loaded = load(self._open_bundle, self.state.config, self._options, self._warm_up, self._progress)
        except StoppedLoadingError:
            return False
        except BaseException as e:  # noqa: BLE001 - the server's thread raises it
            self.state.load_error = e
        else:
            if self._stopped():
                loaded.served.close()
                return False
            self._begin(loaded)
            served, seconds = loaded.served, time.monotonic() - self._began
            device = served.bundle.manifest.device
            self._report(Ready(served.model_name, device, seconds, loaded.warm.buckets, loaded.compilations))
        return True

    def prepare(self) -> None:
        """Load grammar support once requests are served."""
        if self.state.served is not None:
            read_grammars(self.state.served, self.state.config)

    def _load_beside(self, bundle: Bundle, on_progress: Callable[[Progress], None]) -> Loaded:
        """Runs in the swapper's thread, without observers."""
        if bundle.has_tokenizer:
            require_sound(bundle.files.read("tokenizer.json"))
        loaded = load(lambda _: bundle, self.state.config, self._options, self._warm_up, on_progress)
        read_grammars(loaded.served, self.state.config)
        return loaded

    def _progress(self, progress: Progress) -> None:
        if self._stopped():
            raise StoppedLoadingError
        self.state.progress = progress
        self._report(progress)

    def _progress_aside(self, progress: Progress) -> None:
        self.state.aside = progress

    def _warm_aside(self, event: WarmAside) -> None:
        self.state.aside = None
        self._report(event)

    def _begin(self, loaded: Loaded) -> None:
        served = loaded.served
        pooler, manifest = served.pooler, served.bundle.manifest
        plan = served.bundle.plan if pooler is None else None
        self.state.metrics.bind(
            served.model_name, lambda: self.swapper.stats, self._cache_counters, plan, manifest.device, loaded.origin,
            manifest.digest,
        )  # fmt: skip
        if plan is not None:
            self.state.snapshot.bind(plan)
        if pooler is not None:
            self.state.metrics.bind_pooling(lambda: pooler.pooler.statistics)
        else:
            served.generating.engine.observer = self._observer
        self.state.served = served
        if loaded.warm.aside is not None:
            executor = served.generating.engine.core.executor
            served.generating.work_between(aside(executor, loaded.warm.aside, self._progress_aside, self._warm_aside))
