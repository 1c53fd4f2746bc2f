"""POST /v1/embeddings as in OpenAI's API; /v1/rerank and /v1/score as in vLLM 0.11, Jina and Cohere."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from llmc.errors import InputError
from llmc.runtime.pooling.pooler import paired
from llmc.server.errors import api_error, bad_request
from llmc.server.protocol import base
from llmc.server.protocol.answers import GENERATING
from llmc.server.protocol.base import AtMost, Body, Name, Refused, Text
from llmc.server.protocol.requests import Prompts
from llmc.server.routes.common import read_body, reads, serving

if TYPE_CHECKING:
    from llmc.runtime.pooling.pooler import AsyncPooler, Pooled
    from llmc.server.state import Served


_Texts = Annotated[list[Text], AtMost(base.MAX_PROMPTS, least=1)]
_Positive = Annotated[int, Field(ge=1)]


class _Pooling(Body):
    model: Name | None = None
    user: Name | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None,
        description="Truncate texts to this many tokens; -1: the model's limit. Default: refuse longer ones.",
    )

    refused: ClassVar[Refused] = {"priority": (lambda value: value == 0, "batches are by length")}


class EmbeddingRequest(_Pooling):
    """Embed each input: texts, or token ids."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: float32, little endian.")
    dimensions: _Positive | None = Field(None, description="Keep this many leading dimensions and normalize again.")
    prompt_name: Name | None = Field(None, description="Name of a checkpoint prompt to put before each text.")


class RerankRequest(_Pooling):
    """Rank documents by their relevance to the query, best first."""

    query: Text
    documents: _Texts
    top_n: Annotated[int, Field(ge=0)] | None = Field(None, description="Return only this many best documents; 0: all.")
    return_documents: bool = True


class ScoreRequest(_Pooling):
    """Score each of text_2 against text_1: one text for all of them, or one each."""

    text_1: Text | _Texts
    text_2: Text | _Texts


class PoolingUsage(BaseModel):
    """Input tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(BaseModel):
    """The vector of input `index`, as numbers or in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    """The response of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: PoolingUsage


class RankedItem(BaseModel):
    """Document `index` of the request."""

    index: int
    document: dict[str, Any] | None
    relevance_score: float


class RerankResponse(BaseModel):
    """The response of /v1/rerank, best first."""

    id: str
    model: str
    results: list[RankedItem]
    usage: PoolingUsage


class ScoreItem(BaseModel):
    """The score of pair `index`."""

    object: Literal["score"]
    index: int
    score: float


class ScoreResponse(BaseModel):
    """The response of /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreItem]
    usage: PoolingUsage


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
