"""GET /metrics: what Prometheus reads."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

router = APIRouter()


@router.get("/metrics", include_in_schema=False)
def metrics(request: Request) -> Response:
    """Everything in Prometheus' text format, or OpenMetrics where the Accept header asks for it; also while loading."""
    state = request.app.state.llmc
    text, content_type = state.metrics.render(request.headers.get("accept", ""), ready=state.phase == "ready")
    return Response(text, media_type=content_type, headers={"Cache-Control": "no-store"})
