"""GET /version."""

from __future__ import annotations

from fastapi import APIRouter

from llmc import __version__
from llmc.server.protocol.answers import VersionResponse, errors

router = APIRouter()


@router.get("/version", response_model=VersionResponse, responses=errors())
async def version() -> dict[str, str]:
    """llmc's version."""
    return {"version": __version__}
