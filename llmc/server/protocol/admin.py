"""POST /admin/bundle: the request."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llmc.server.protocol.base import Body

MAX_NAME = 4096


class SwapRequest(Body):
    """The bundle to serve: a folder of the server's host, an archive, store:KEY or oci://…; None: what the server was
    started with, as it is now. `allow_older`: one that was replaced before, or an older llmc wrote, is taken too."""

    bundle: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    allow_older: bool = False
