"""Vectors and scores with the names that vLLM has for them, and the calls of offline inference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.runtime.pooling.pooler import Pooler
    from llmc.runtime.pooling.tokens import Pair


@dataclass(frozen=True)
class EmbeddingOutput:
    """`embedding`: the text's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its numbers."""
        return len(self.embedding)


@dataclass(frozen=True)
class ScoringOutput:
    """`score`: of a model with several labels the first one's; `scores` has all."""

    score: float
    scores: tuple[float, ...]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The output of one text, whose tokens were `prompt_tokens`."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_tokens: int
    finished: bool = True


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The output of one pair of texts, whose tokens were `prompt_tokens`."""

    request_id: str
    outputs: ScoringOutput
    prompt_tokens: int
    finished: bool = True


def embeddings(
    pooler: Pooler, prompts: str | list[int] | Sequence[str | list[int]], **how: Any
) -> list[EmbeddingRequestOutput]:
    """The vectors of one text, of several, or of token ids; `how` as `Pooler.embed`."""
    alone = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
    given: list[Any] = [prompts] if alone else list(prompts)
    found = pooler.embed(given, **how) if given else []
    return [
        EmbeddingRequestOutput(str(at), EmbeddingOutput(one.values.tolist()), one.prompt_tokens)
        for at, one in enumerate(found)
    ]


def scores(
    pooler: Pooler, queries: str | Sequence[str], documents: str | Sequence[str], cut: int | None = None
) -> list[ScoringRequestOutput]:
    """The score of each pair: one query for all documents, or one each. Raises InputError for other numbers of them."""
    given = paired(queries, documents)
    return [
        ScoringRequestOutput(
            str(at), ScoringOutput(float(one.values[0]), tuple(one.values.tolist())), one.prompt_tokens
        )
        for at, one in enumerate(pooler.score(given, cut=cut) if given else [])
    ]


def paired(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[Pair]:
    """The pairs of texts. Raises InputError where there are neither one query nor as many as documents."""
    second = [documents] if isinstance(documents, str) else list(documents)
    first = [queries] if isinstance(queries, str) else list(queries)
    first = first * len(second) if len(first) == 1 else first
    if len(first) != len(second):
        raise InputError(f"{len(first)} queries for {len(second)} documents; give one query, or one for each")
    return list(zip(first, second, strict=True))
