"""POST /v1/embeddings, /v1/rerank and /v1/score, over a bundle that embeds or scores."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from llmc.errors import InputError
from llmc.runtime.pooling.pooler import paired
from llmc.server.access import serving
from llmc.server.body import read_body
from llmc.server.errors import api_error, bad_request
from llmc.server.openapi import reads
from llmc.server.protocol.answers import GENERATING
from llmc.server.protocol.pooling import (
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)

if TYPE_CHECKING:
    from llmc.runtime.pooling.pooler import AsyncPooler, Pooled
    from llmc.server.state import Served

router = APIRouter()


@router.post(
    "/v1/embeddings", response_model=None, responses={200: {"model": EmbeddingResponse}, **GENERATING},
    openapi_extra=reads(EmbeddingRequest),
)  # fmt: skip
async def embeddings(request: Request) -> Response:
    """Embed texts."""
    body = await read_body(request, EmbeddingRequest)
    served = serving(request, body.model)
    pooler = pooling_of(served, "embed", "embeddings")
    how: dict[str, Any] = {
        "prompt_name": body.prompt_name, "dimensions": body.dimensions, "cut": body.truncate_prompt_tokens,
    }  # fmt: skip
    try:
        found = await pooler.run(lambda p: p.embed(body.input, **how))
    except InputError as e:
        raise api_error(e, EmbeddingRequest.model_fields) from e
    data = [
        {"object": "embedding", "index": at, "embedding": _written(one, body.encoding_format)}
        for at, one in enumerate(found)
    ]
    return _listed("embd", served, data, found)


@router.post(
    "/v1/rerank", response_model=None, responses={200: {"model": RerankResponse}, **GENERATING},
    openapi_extra=reads(RerankRequest),
)  # fmt: skip
async def rerank(request: Request) -> Response:
    """Rank documents by relevance to a query."""
    body = await read_body(request, RerankRequest)
    served = serving(request, body.model)
    pairs = paired(body.query, body.documents)
    found = await _scored(served, pairs, body.truncate_prompt_tokens, "rerank", RerankRequest)
    ranked = sorted(enumerate(found), key=lambda item: -float(item[1].values[0]))[: body.top_n or None]
    results = [
        {
            "index": at, "document": {"text": body.documents[at]} if body.return_documents else None,
            "relevance_score": float(one.values[0]),
        }
        for at, one in ranked
    ]  # fmt: skip
    whole = {"id": f"rerank-{uuid.uuid4().hex}", "model": served.model_name, "results": results}
    return JSONResponse({**whole, "usage": _usage(found)})


@router.post(
    "/v1/score", response_model=None, responses={200: {"model": ScoreResponse}, **GENERATING},
    openapi_extra=reads(ScoreRequest),
)  # fmt: skip
async def score(request: Request) -> Response:
    """Score pairs of texts."""
    body = await read_body(request, ScoreRequest)
    served = serving(request, body.model)
    try:
        pairs = paired(body.text_1, body.text_2)
    except InputError as e:
        raise bad_request(str(e), "text_1") from e
    found = await _scored(served, pairs, body.truncate_prompt_tokens, "score", ScoreRequest)
    data = [{"object": "score", "index": at, "score": float(one.values[0])} for at, one in enumerate(found)]
    return _listed("score", served, data, found)


def pooling_of(served: Served, task: str, what: str) -> AsyncPooler:
    """Return the served pooler. Raises ApiError if the bundle has another task."""
    if served.pooler is None or served.pooler.pooler.task != task:
        has = "generates text" if served.pooler is None else f"is compiled to {served.pooler.pooler.task}"
        raise bad_request(f"the served model {has}; {what} needs one compiled to {task}", code="unsupported_endpoint")
    return served.pooler


async def _scored(
    served: Served, pairs: Sequence[tuple[str, str]], cut: int | None, what: str, body: type[Any]
) -> list[Pooled]:
    pooler = pooling_of(served, "score", what)
    try:
        return await pooler.run(lambda p: p.score(pairs, cut=cut))
    except InputError as e:
        raise api_error(e, body.model_fields) from e


def _written(one: Pooled, form: str) -> list[float] | str:
    return base64.b64encode(one.values.astype("<f4").tobytes()).decode() if form == "base64" else one.values.tolist()


def _usage(found: Sequence[Pooled]) -> dict[str, int]:
    tokens = sum(one.prompt_tokens for one in found)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _listed(kind: str, served: Served, data: list[dict[str, Any]], found: Sequence[Pooled]) -> Response:
    return JSONResponse({
        "id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": served.model_name,
        "data": data, "usage": _usage(found),
    })  # fmt: skip
