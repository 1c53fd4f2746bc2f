"""The OpenAPI document: FastAPI's routes, the bodies that routes read themselves, and the API key."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response
from pydantic.json_schema import models_json_schema

from llmc.server.shared import SharedWork

if TYPE_CHECKING:
    from fastapi import FastAPI

    from llmc.server.protocol.base import Body

_REF = "#/components/schemas/{model}"


def reads(model: type[Body]) -> dict[str, Any]:
    """Return `openapi_extra` for a route that reads its body as `model`."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def streams(description: str) -> dict[str, Any]:
    """Describe the streamed form of a 200 response."""
    data = {"type": "string", "description": "A chunk as JSON, an error object as JSON, or [DONE]."}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"description": description, "content": {"text/event-stream": {"schema": event}}}


def document(app: FastAPI, bodies: Iterable[type[Body]], keyed: bool, open_paths: Iterable[str]) -> None:
    """Add schemas of `bodies` and, if `keyed`, the key for all but `open_paths` to /openapi.json, which is rendered
    once.
    """
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            built = plain()
            _, found = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
            components = built.setdefault("components", {})
            components["schemas"] = {**components.get("schemas", {}), **found.get("$defs", {})}
            if keyed:
                components["securitySchemes"] = {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "basic": {"type": "http", "scheme": "basic", "description": "The key as password; any user name."},
                }
                built["security"] = [{"bearer": []}, {"basic": []}]
                for path in open_paths:
                    for operation in built["paths"].get(path, {}).values():
                        operation["security"] = []
            app.openapi_schema = built
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    written: list[bytes] = []
    shared = SharedWork()

    async def openapi_json() -> Response:
        if not written:
            written.append(await shared.get(lambda: json.dumps(openapi()).encode()))
        return Response(written[0], media_type="application/json")

    app.add_api_route("/openapi.json", openapi_json, include_in_schema=False)
