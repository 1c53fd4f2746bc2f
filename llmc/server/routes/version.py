"""GET /version."""

from __future__ import annotations

from fastapi import APIRouter

from llmc.server.protocol.answers import VersionResponse, errors
from llmc.version import __version__

router = APIRouter()


@router.get("/version", response_model=VersionResponse, responses=errors())
async def version() -> dict[str, str]:
    """llmc's version."""
    return {"version": __version__}
