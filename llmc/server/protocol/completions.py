"""The request of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.server.errors import bad_request
from llmc.server.protocol import bounds
from llmc.server.protocol.base import Refused
from llmc.server.protocol.bounds import AtMost, Text, reported
from llmc.server.protocol.sampling import Int64, Sampled, Whole

DEFAULT_MAX_TOKENS = 16
_FORMS = "must be a text, token ids, or a list of texts or of lists of token ids, and not empty"


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 31 for item in value)


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """Convert all four forms to a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [value]
        if len(value) > bounds.MAX_PROMPTS:
            raise PydanticCustomError("bound", "{told}", {"told": reported(value, bounds.MAX_PROMPTS)})
        if all(isinstance(item, str) for item in value) or all(_is_ids(item) for item in value):
            return value
    raise ValueError(_FORMS)


_Id = Annotated[int, Field(ge=0, lt=1 << 31)]
_Ids = Annotated[list[_Id], AtMost(bounds.MAX_IDS, least=1)]
_Texts = Annotated[list[Text], AtMost(bounds.MAX_PROMPTS, least=1)]
_Lists = Annotated[list[_Ids], AtMost(bounds.MAX_PROMPTS, least=1)]
Prompts = Annotated[list[Any], BeforeValidator(_prompts, json_schema_input_type=Text | _Texts | _Ids | _Lists)]


class CompletionRequest(Sampled):
    """Complete one or more prompts: texts, or token ids."""

    prompt: Prompts
    best_of: Annotated[Whole, Field(ge=1, le=128)] | None = None
    echo: bool | None = Field(None, description="Put the prompt before each text.")
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = Field(
        None, description="Return log probabilities of chosen tokens and of this many most probable ones."
    )
    max_completion_tokens: Int64 | None = Field(None, description="The same as max_tokens.")

    refused: ClassVar[Refused] = {
        **Sampled.refused,
        "suffix": (lambda value: value == "", "text is continued, not filled in"),
    }

    def params(self) -> SamplingParams:
        """Return the sampling parameters; raises InputError or ApiError that names an unsupported field."""
        self.check_stream()
        best_of = self.best_of
        if best_of is not None and best_of < (self.n or 1):
            raise bad_request(f"best_of {best_of} is less than n {self.n or 1}", "best_of")
        if self.stream and best_of is not None and best_of > (self.n or 1):
            raise bad_request("best_of above n cannot be streamed: the best is known only at the end", "best_of")
        if self.scores and (self.stream or (self.n or 1) > 1 or (best_of or 1) > 1):
            raise bad_request("echo with logprobs, or max_tokens 0, is one whole answer: leave out stream, n, best_of")
        more = {} if best_of is None else {"best_of": best_of}
        return self.sampling(self.wanted or 1, self.logprobs, **more)

    @property
    def wanted(self) -> int:
        """Tokens to generate; -1: as many as the model takes."""
        requested = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return DEFAULT_MAX_TOKENS if requested is None else requested

    @property
    def scores(self) -> bool:
        """Whether the prompt's own tokens are the answer, with their log probabilities."""
        return bool(self.echo and self.logprobs is not None) or self.wanted == 0
