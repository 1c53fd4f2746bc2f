"""POST /admin/bundle: serve another bundle. GET /admin/bundle: which one is served. For who has the admin token."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from llmc.server.access import served_of, state_of
from llmc.server.auth import ADMIN
from llmc.server.body import read_body
from llmc.server.errors import unavailable
from llmc.server.protocol.admin import SwapRequest

router = APIRouter(include_in_schema=False)
PATH = f"{ADMIN}bundle"


@router.get(PATH)
async def bundle(request: Request) -> dict[str, Any]:
    """The folder, digest, model and device of the bundle that is served, and its plan."""
    served = served_of(request)
    manifest = served.bundle.manifest
    return {
        "bundle": str(served.bundle.path), "digest": manifest.digest, "model": served.model_name,
        "device": manifest.device, "plan": dict(manifest.plan),
    }  # fmt: skip


@router.post(PATH)
async def swap(request: Request) -> dict[str, Any]:
    """Take another bundle, see swapping.py; the answer comes when new requests go to it."""
    empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    body = SwapRequest() if empty else await read_body(request, SwapRequest)
    swapping = state_of(request).swap
    if swapping is None:
        raise unavailable("the server is starting", 1.0, "not_ready")
    return asdict(await swapping(body.bundle, body.allow_older))
