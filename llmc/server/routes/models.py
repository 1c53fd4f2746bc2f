"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from llmc.server.access import check_model, served_of, state_of
from llmc.server.protocol.answers import ModelCard, ModelList, errors

if TYPE_CHECKING:
    from llmc.server.state import Served

router = APIRouter()


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
