"""POST /v1/embeddings: a clear no."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from llmc.server.errors import bad_request
from llmc.server.protocol.answers import errors

router = APIRouter()


@router.post("/v1/embeddings", response_model=None, status_code=400, responses=errors(400))
async def embeddings() -> Response:
    """Not served: compiled graphs return logits."""
    raise bad_request("this server serves text generation, not embeddings", code="unsupported_endpoint")
