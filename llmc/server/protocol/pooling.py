"""POST /v1/embeddings as in OpenAI's API; /v1/rerank and /v1/score as in vLLM 0.11, Jina and Cohere."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from llmc.server.protocol import bounds
from llmc.server.protocol.base import Body, Refused
from llmc.server.protocol.bounds import AtMost, Name, Text
from llmc.server.protocol.completions import Prompts

_Texts = Annotated[list[Text], AtMost(bounds.MAX_PROMPTS, least=1)]
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
