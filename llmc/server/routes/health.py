"""Liveness and readiness for orchestrators and load balancers, without an API key; and GET /version."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from llmc.server.access import state_of
from llmc.server.protocol.answers import VersionResponse, errors
from llmc.version import __version__

if TYPE_CHECKING:
    from llmc.server.state import Progress, ServerState

router = APIRouter(tags=["health"])

LONGEST_RETRY_S = 60
SERVICE = {
    "Service Title": "llmc serve",
    "Service Description": "OpenAI-compatible text generation over precompiled graphs",
}
"""The description that OPEA services return."""
_DEAD = "stopped on an error; see the server's log, and start it again"
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}}},
    503: {"description": "Unavailable", "content": {"application/json": {"schema": {"type": "object"}}}},
}


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=_RESPONSES)
async def health(request: Request) -> Response:
    """200 while the process is alive, also while it loads or drains; 503 once loading or the engine failed."""
    state = state_of(request)
    if state.phase == "dead":
        return JSONResponse({"status": "dead", "phase": "dead", "message": _dead(state)}, 503)
    return JSONResponse({"status": "ok", "phase": state.phase})


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses=_RESPONSES)
async def ready(request: Request) -> Response:
    """200 when requests are served; 503 while loading (with the progress), while draining, and once dead.

    `done` of `total` parts of `stage` are done; `eta_s` is the seconds left, null if unknown. While a ready server
    warms up between requests, `warming` has the same fields.
    """
    state = state_of(request)
    phase = state.phase
    progress = state.awaits() if phase == "ready" else state.progress
    if phase == "ready" and progress is None:
        body: dict[str, Any] = {"status": "ready", "phase": phase}
        if state.aside is not None:
            body["warming"] = _reported(state.aside)
        return JSONResponse(body)
    if progress is None or phase not in ("loading", "ready"):
        message = _dead(state) if phase == "dead" else "the server is shutting down"
        return JSONResponse({"status": "unavailable", "phase": phase, "message": message}, 503)
    body = {"status": "loading", "phase": "loading", **_reported(progress)}
    return JSONResponse(body, 503, {"Retry-After": str(retry_after_s(progress.eta_s))})


@router.get("/v1/health_check", responses=_RESPONSES)
async def health_check(request: Request) -> Response:
    """Like /health, in the format of OPEA services."""
    if state_of(request).phase == "dead":
        return JSONResponse({**SERVICE, "Service Status": "dead"}, 503)
    return JSONResponse(SERVICE)


@router.get("/version", response_model=VersionResponse, responses=errors(), tags=["version"])
async def version() -> dict[str, str]:
    """The version of llmc."""
    return {"version": __version__}


def retry_after_s(eta_s: float | None) -> int:
    """Return the seconds to wait before a retry, 1 … LONGEST_RETRY_S."""
    return min(LONGEST_RETRY_S, max(1, math.ceil(eta_s or 0)))


def _reported(at: Progress) -> dict[str, Any]:
    left = None if at.eta_s is None else round(at.eta_s, 1)
    return {"stage": at.stage, "done": at.done, "total": at.total, "eta_s": left}


def _dead(state: ServerState) -> str:
    return f"loading {_DEAD}" if state.load_error is not None else f"the engine {_DEAD}"
