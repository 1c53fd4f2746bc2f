"""GET /metrics: what Prometheus reads."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llmc.server.telemetry.metrics import text_of

router = APIRouter()

OPENMETRICS = "application/openmetrics-text"


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Everything in Prometheus' text format, or OpenMetrics where the Accept header asks for it; also while loading.

    Of all replicas, where this is one of several.
    """
    state = request.app.state.llmc
    accept = OPENMETRICS if OPENMETRICS in request.headers.get("accept", "") else ""
    if state.all_metrics is not None:
        text, content_type = text_of(await state.all_metrics(), accept)
    else:
        text, content_type = await state.rendered[bool(accept)].get(
            lambda: state.metrics.render(accept, ready=state.phase == "ready")
        )
    return Response(text, media_type=content_type, headers={"Cache-Control": "no-store"})
