"""POST /admin/bundle swaps the bundle, GET /admin/bundle describes the served one; both need the admin token."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from llmc.server.access import served_of, state_of
from llmc.server.auth import ADMIN
from llmc.server.body import read_body
from llmc.server.errors import unavailable
from llmc.server.protocol.base import Body

router = APIRouter(include_in_schema=False)
PATH = f"{ADMIN}bundle"
MAX_NAME = 4096


class SwapRequest(Body):
    """The bundle to serve: a folder on the server's host, an archive, store:KEY or oci://…

    None: reopen the one that the server was started with. `allow_older`: accept a bundle that was replaced before or
    was written by an older llmc.
    """

    bundle: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    allow_older: bool = False


@router.get(PATH)
async def bundle(request: Request) -> dict[str, Any]:
    """Folder, digest, model, device and plan of the served bundle."""
    served = served_of(request)
    manifest = served.bundle.manifest
    return {
        "bundle": str(served.bundle.path), "digest": manifest.digest, "model": served.model_name,
        "device": manifest.device, "plan": dict(manifest.plan),
    }  # fmt: skip


@router.post(PATH)
async def swap(request: Request) -> dict[str, Any]:
    """Swap to another bundle; responds when new requests go to it."""
    empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    body = SwapRequest() if empty else await read_body(request, SwapRequest)
    swapping = state_of(request).swap
    if swapping is None:
        raise unavailable("the server is starting", 1.0, "not_ready")
    return asdict(await swapping(body.bundle, body.allow_older))
