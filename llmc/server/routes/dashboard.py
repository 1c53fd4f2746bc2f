"""The dashboard: GET /dashboard (a self-contained page), /dashboard/data (its numbers), and /dashboard/replan.

The last computes what another plan would save for the traffic so far. GET / redirects to the page.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse

from llmc.server.routes.metrics import metrics_text
from llmc.version import __version__

if TYPE_CHECKING:
    from llmc.server.state import Served, ServerState

PAGE = Path(__file__).parent.parent / "dashboard.html"
_NONCE = "{{nonce}}"

router = APIRouter()


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
