"""Access to the served model for routes, and the errors while none is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.errors import EngineDeadError
from llmc.server.errors import SERVER, ApiError, unavailable

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from llmc.server.state import Served, ServerState

LONGEST_RETRY_S = 60.0
_USED = "llmc.used"


class HoldServed:
    """Counts a request among the users of the served model from `served_of` until it is answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        used: list[Served] = []
        scope[_USED] = used
        try:
            await self._app(scope, receive, send)
        finally:
            for served in used:
                served.users.add(-1)


def state_of(request: Request) -> ServerState:
    """Return the server's state."""
    state: ServerState = request.app.state.llmc
    return state


def served_of(request: Request) -> Served:
    """Return what is served now; it stays open until the request is answered.

    Raises ApiError 503 while loading and after loading failed.
    """
    state = state_of(request)
    if state.load_error is not None:
        raise ApiError(503, "the server could not load its model; see its log", kind=SERVER, code="load_failed")
    if state.served is None:
        progress = state.progress
        message = f"the model is loading ({progress.stage}, {progress.done} of {progress.total}); try again later"
        eta = 1.0 if progress.eta_s is None else progress.eta_s
        raise unavailable(message, min(eta, LONGEST_RETRY_S), "loading")
    state.served.users.add(1)
    request.scope[_USED].append(state.served)
    return state.served


def serving(request: Request, model: str | None) -> Served:
    """Return the served model if `model` names it or one of its adapters (None: the model itself).

    Raises ApiError 503 while loading or draining, ApiError 404 for another model, and EngineDeadError.
    """
    served = served_of(request)
    check_model(served, model)
    if state_of(request).draining:
        error = unavailable("the server is shutting down; send the request to another one", LONGEST_RETRY_S, "draining")
        error.headers["Connection"] = "close"
        raise error
    if served.engine.error is not None:
        raise EngineDeadError("the engine stopped on an error; see the server's log, and start it again")
    return served


def check_model(served: Served, model: str | None) -> None:
    """Raise ApiError 404 if `model` is neither None, the served model, nor one of its adapters."""
    if model is not None and model not in served.names:
        raise ApiError(
            404, f"the model {model[:200]!r} is not served here; this server has {', '.join(map(repr, served.names))}",
            param="model", code="model_not_found",
        )  # fmt: skip
