"""GET /metrics, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llmc.server.telemetry.metrics import text_of

if TYPE_CHECKING:
    from llmc.server.state import ServerState

router = APIRouter()

OPENMETRICS = "application/openmetrics-text"


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
