"""The server itself: liveness, readiness, version, models, metrics, the dashboard, and swaps of the bundle."""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from pydantic import Field

from llmc.server.clients import ADMIN
from llmc.server.errors import unavailable
from llmc.server.protocol.answers import ModelCard, ModelList, VersionResponse, errors
from llmc.server.protocol.base import Body
from llmc.server.routes.common import check_model, read_body, served_of, state_of
from llmc.server.telemetry.metrics import text_of
from llmc.version import __version__

if TYPE_CHECKING:
    from llmc.server.state import Progress, Served, ServerState


router = APIRouter()
admin = APIRouter(include_in_schema=False)
"""Routes that exist only with an admin token."""

LONGEST_RETRY_S = 60
OPENMETRICS = "application/openmetrics-text"
PAGE = Path(__file__).parent.parent / "dashboard.html"
_NONCE = "{{nonce}}"
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
@router.get("/health", responses=_RESPONSES, tags=["health"])
async def health(request: Request) -> Response:
    """200 while the process is alive, also while it loads or drains; 503 once loading or the engine failed."""
    state = state_of(request)
    if state.phase == "dead":
        return JSONResponse({"status": "dead", "phase": "dead", "message": _dead(state)}, 503)
    return JSONResponse({"status": "ok", "phase": state.phase})


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses=_RESPONSES, tags=["health"])
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


@router.get("/v1/health_check", responses=_RESPONSES, tags=["health"])
async def health_check(request: Request) -> Response:
    """Like /health, in the format of OPEA services."""
    if state_of(request).phase == "dead":
        return JSONResponse({**SERVICE, "Service Status": "dead"}, 503)
    return JSONResponse(SERVICE)


@router.get("/version", response_model=VersionResponse, responses=errors(), tags=["health", "version"])
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


@router.get("/v1/models", response_model=ModelList, responses=errors(503))
async def models(request: Request) -> dict[str, Any]:
    """The served model and its adapters."""
    served = served_of(request)
    return {"object": "list", "data": [_entry(request, served, name) for name in served.names]}


@router.get("/v1/models/{name:path}", response_model=ModelCard, responses=errors(404, 503))
async def model(request: Request, name: str) -> dict[str, Any]:
    """One model or adapter."""
    served = served_of(request)
    check_model(served, name)
    return _entry(request, served, name)


def _entry(request: Request, served: Served, name: str) -> dict[str, Any]:
    number = served.adapter(name)
    return {
        "id": name,
        "object": "model",
        "created": int(state_of(request).started_at),
        "owned_by": "llmc",
        "max_model_len": served.limits.max_model_len,
        "root": served.bundle.adapters[number - 1].root if number else served.model_name,
        "parent": served.model_name if number else None,
        "default_sampling_params": state_of(request).config.recommended(served),
    }


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """All metrics, in Prometheus' text format or OpenMetrics, as the Accept header requests; also while loading.

    A replica returns the metrics of all replicas.
    """
    state = request.app.state.llmc
    text, content_type = await metrics_text(state, request.headers.get("accept", ""))
    return Response(text, media_type=content_type, headers={"Cache-Control": "no-store"})


async def metrics_text(state: ServerState, requested: str = "") -> tuple[bytes, str]:
    """Return the text and its content type, for an Accept header."""
    accept = OPENMETRICS if OPENMETRICS in requested else ""
    if state.all_metrics is not None:
        return text_of(await state.all_metrics(), accept)
    return await state.rendered[bool(accept)].get(lambda: state.metrics.render(accept, ready=state.phase == "ready"))


@router.get("/", include_in_schema=False)
def root() -> RedirectResponse:
    """Redirect a browser that opens the server's address to the dashboard."""
    return RedirectResponse("/dashboard")


@router.get("/dashboard", include_in_schema=False)
def dashboard() -> HTMLResponse:
    """Return the page. Its policy allows only its own script and requests to this server."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(_page().replace(_NONCE, nonce), headers=headers)


@router.get("/dashboard/data", include_in_schema=False)
def data(request: Request) -> JSONResponse:
    """Current numbers, the last minute and totals since the start; `model` and `plan` are null while loading."""
    return JSONResponse(_data(request.app.state.llmc), headers={"Cache-Control": "no-store"})


@router.get("/dashboard/replan", include_in_schema=False)
async def replan(request: Request) -> JSONResponse:
    """By phase, the padding of the served plan and of the best plan with no more graphs; see replanning.Offer."""
    state: ServerState = request.app.state.llmc
    if state.served is None or state.served.bundle.task != "generate":
        return JSONResponse({"offer": None})
    text, _ = await metrics_text(state)
    found = await state.replanner.offer(state.served.bundle.plan, text.decode())
    return JSONResponse(found, headers={"Cache-Control": "no-store"})


@cache
def _page() -> str:
    return PAGE.read_text(encoding="utf-8")


def _data(state: ServerState) -> dict[str, Any]:
    served = state.served
    found: dict[str, Any] = {
        "phase": state.phase,
        "version": __version__,
        "uptime_s": round(time.time() - state.started_at, 1),
        "progress": asdict(state.progress),
        "model": None,
        "device": None,
        "limits": None,
        "plan": None,
        "stats": None,
        **state.snapshot.to_dict(),
    }
    return found if served is None else {**found, **_served(served)}


def _served(served: Served) -> dict[str, Any]:
    bundle = served.bundle
    plan = bundle.plan if bundle.task == "generate" else bundle.encode_plan
    return {
        "model": served.model_name,
        "device": served.bundle.manifest.device,
        "limits": served.limits.to_dict(),
        "plan": {
            phase: [[b.batch, b.query, b.context] for b in buckets]
            for phase, buckets in (("prompt", plan.prompt), ("decode", plan.decode))
        },
        "stats": asdict(served.engine.stats),
    }


PATH = f"{ADMIN}bundle"
MAX_NAME = 4096


class SwapRequest(Body):
    """The bundle to serve: a folder on the server's host, an archive, store:KEY or oci://…

    None: reopen the one that the server was started with. `allow_older`: accept a bundle that was replaced before or
    was written by an older llmc.
    """

    bundle: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    allow_older: bool = False


@admin.get(PATH)
async def bundle(request: Request) -> dict[str, Any]:
    """Folder, digest, model, device and plan of the served bundle."""
    served = served_of(request)
    manifest = served.bundle.manifest
    return {
        "bundle": str(served.bundle.path), "digest": manifest.digest, "model": served.model_name,
        "device": manifest.device, "plan": dict(manifest.plan),
    }  # fmt: skip


@admin.post(PATH)
async def swap(request: Request) -> dict[str, Any]:
    """Swap to another bundle; responds when new requests go to it."""
    empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    body = SwapRequest() if empty else await read_body(request, SwapRequest)
    swapping = state_of(request).swap
    if swapping is None:
        raise unavailable("the server is starting", 1.0, "not_ready")
    return asdict(await swapping(body.bundle, body.allow_older))
