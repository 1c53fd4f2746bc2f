"""The fields that completions and chats share, and their conversion to SamplingParams."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from llmc.errors import InputError
from llmc.runtime.engine.sampling.params import SamplingParams, StructuredOutputsParams
from llmc.server.errors import bad_request
from llmc.server.protocol import bounds
from llmc.server.protocol.base import Body, BodyPart, Refused
from llmc.server.protocol.bounds import AtMost, BoundedName, Name, Object

MAX_N = 128
"""Choices per prompt, the same limit as OpenAI's."""


def _whole(value: Any) -> Any:
    """Convert 16.0 to 16: the only numbers of some clients (Lua, Go's any) are floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole, json_schema_input_type=int)]
Int64 = Annotated[Whole, Field(ge=-(1 << 63), lt=1 << 63)]
Source = Annotated[str, AtMost(bounds.MAX_GRAMMAR, least=1)]
Choices = Annotated[list[Annotated[str, AtMost(bounds.MAX_GRAMMAR)]], AtMost(bounds.MAX_CHOICES)]


def empty(value: Any) -> bool:
    """Whether a value requests nothing: null, false, 0, "", [] or {}."""
    return not value


def _texts(value: Any) -> Any:
    """Convert one text to a list."""
    if isinstance(value, str | list):
        return [value] if isinstance(value, str) else value
    raise ValueError("must be a text or a list of texts")


_Stop = Annotated[str, AtMost(bounds.MAX_STOP)]
_Stops = Annotated[list[_Stop], AtMost(bounds.MAX_STOPS)]
Texts = Annotated[_Stops, BeforeValidator(_texts, json_schema_input_type=_Stop | _Stops)]


class StreamOptions(BodyPart):
    """What a stream contains besides the text."""

    include_usage: bool | None = Field(None, description="End with a chunk that has the usage and no choice.")
    continuous_usage_stats: bool | None = Field(None, description="Every chunk has the usage so far.")


class StructuredOutputs(BodyPart):
    """Constrains the text; set exactly one field."""

    json_schema: Object | Source | None = Field(None, alias="json", description="A JSON schema.")
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = Field(None, description="A grammar in Lark notation.")
    json_object: bool | None = None


class NamedSchema(BodyPart):
    """The json_schema of a response_format."""

    name: Name | None = None
    schema_: Object | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BodyPart):
    """The format of the answer: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Object | None = Field(None, alias="schema", description="With json_object, as llama.cpp takes it.")


class Sampled(Body):
    """Token selection and the other fields of any text generation request. Omitted or null: the default."""

    model: Name | None = Field(None, description="The served model's name, or an adapter's; may be left out.")
    n: Annotated[Whole, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: Int64 | None = Field(None, description="-1: as many as the model takes.")
    temperature: float | None = Field(None, description="Default 1; 0 is greedy.")
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[BoundedName, float], AtMost(bounds.MAX_BIASES)] | None = Field(
        None, description="Maps token ids to biases added to their logits."
    )
    seed: Int64 | None = None
    stop: Texts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None
    response_format: ResponseFormat | None = None

    top_k: Int64 | None = Field(None, description="Keep this many most probable tokens; 0 or -1: all.")
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int64 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Int64], AtMost(bounds.MAX_STOP_IDS)] | None = None
    allowed_token_ids: Annotated[list[Int64], AtMost(bounds.MAX_ALLOWED_IDS)] | None = None
    bad_words: Annotated[list[Annotated[str, AtMost(bounds.MAX_BAD_WORD)]], AtMost(bounds.MAX_BAD_WORDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1, lt=1 << 63)] | None = Field(
        None, description="Keep this many of the prompt's last tokens; -1: as many as the model takes."
    )
    priority: Int64 | None = Field(None, description="Lower values run first; default 0.")
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description="Tokens of log probabilities as token_id:5.")
    guided_json: Object | Source | None = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    json_schema: Object | None = Field(None, description="As response_format of type json_schema; llama.cpp's name.")
    grammar: Source | None = Field(None, description="A grammar in GBNF or Lark notation; llama.cpp's name.")
    structured_outputs: StructuredOutputs | None = None

    refused: ClassVar[Refused] = {
        "prompt_logprobs": (lambda value: False, "compiled graphs give the logits of the last token only"),
        "use_beam_search": (empty, "there is no beam search; use n or best_of"),
        "logits_processors": (empty, "custom code is not run; use logit_bias or structured_outputs"),
        "prompt_embeds": (empty, "compiled graphs take token ids only"),
        "regex": (empty, "use guided_regex"),
        "ebnf": (empty, "use guided_grammar"),
        "structural_tag": (empty, "use tools, or structured_outputs"),
        "format": (empty, "use response_format"),
    }

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def as_ids(self) -> bool:
        """Whether tokens of log probabilities are shown as their ids."""
        return bool(self.return_tokens_as_token_ids)

    @property
    def has_running_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check_stream(self) -> None:
        """Raise ApiError for stream_options without a stream."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only allowed when stream is true", "stream_options")

    def sampling(self, max_tokens: int | None, logprobs: int | None, **more: Any) -> SamplingParams:
        """Return the parameters; `more` takes precedence. Raises InputError or ApiError that names the field."""
        given = {name: value for name in _PASSED if (value := getattr(self, name)) is not None}
        most = None if max_tokens == -1 else max_tokens
        return SamplingParams(
            **{**given, "max_tokens": most, "logprobs": logprobs, "structured_outputs": self.structured(), **more}
        )

    def _constraints(self) -> dict[str, dict[str, Any]]:
        """The output constraints by the fields that state them."""
        requested: dict[str, dict[str, Any]] = {}
        for name, spelling in _GUIDED.items():
            if getattr(self, name) is not None:
                requested[name] = {spelling: getattr(self, name)}
        if self.grammar is not None:
            requested["grammar"] = {"grammar": _lark(self.grammar)}
        if self.structured_outputs is not None:
            given = self.structured_outputs
            requested["structured_outputs"] = {
                name: value
                for name, value in (
                    ("json", given.json_schema), ("regex", given.regex), ("choice", given.choice),
                    ("grammar", given.grammar), ("json_object", given.json_object or None),
                ) if value is not None
            }  # fmt: skip
        if self.response_format is not None and self.response_format.type != "text":
            requested["response_format"] = _formatted(self.response_format)
        return requested

    def named(self, error: InputError) -> InputError:
        """Return the error with the client's own field in place of structured_outputs."""
        field = next(iter(self._constraints()), None)
        if field in (None, "structured_outputs"):
            return error
        return InputError(re.sub(r"^structured_outputs\.\w+", str(field), str(error)))

    def structured(self) -> StructuredOutputsParams | None:
        """Return the output constraint from any of its fields; raises ApiError for more than one."""
        requested = self._constraints()
        if not requested:
            return None
        if len(requested) > 1:
            names = " and ".join(requested)
            raise bad_request(f"{names} exclude one another; set only one of them", next(iter(requested)))
        name, options = next(iter(requested.items()))
        try:
            return StructuredOutputsParams(**options)
        except InputError as e:
            raise bad_request(f"{name}: {e}", name) from None


_PASSED = (
    "n", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "allowed_token_ids", "bad_words", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
_GUIDED = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "json_schema": "json",
}  # fmt: skip


def _formatted(requested: ResponseFormat) -> dict[str, Any]:
    if requested.type == "json_object":
        return {"json_object": True} if requested.schema_ is None else {"json": requested.schema_}
    if requested.json_schema is None or requested.json_schema.schema_ is None:
        raise bad_request("response_format of type json_schema needs json_schema.schema", "response_format")
    return {"json": requested.json_schema.schema_}


def _lark(grammar: str) -> str:
    """A grammar in GBNF, which begins at a rule named root, as Lark. Raises ApiError where it cannot be read."""
    try:
        from llguidance.gbnf_to_lark import any_to_lark

        return str(any_to_lark(grammar))
    except ImportError:
        return grammar
    except Exception as error:  # noqa: BLE001 - the converter raises what its parser meets
        raise bad_request(f"grammar: cannot be read as GBNF: {error!s:.200}", "grammar") from None
