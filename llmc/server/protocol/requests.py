"""The requests of POST /v1/completions and /v1/chat/completions, and their conversion to SamplingParams."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from llmc.errors import InputError
from llmc.runtime.engine.sampling.params import SamplingParams, StructuredOutputsParams
from llmc.server.errors import bad_request
from llmc.server.protocol import base
from llmc.server.protocol.base import AtMost, Body, BodyPart, BoundedName, Name, Object, Refused, Text, reported

MAX_N = 128
"""Choices per prompt, the same limit as OpenAI's."""


def _whole(value: Any) -> Any:
    """Convert 16.0 to 16: the only numbers of some clients (Lua, Go's any) are floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole, json_schema_input_type=int)]
Int64 = Annotated[Whole, Field(ge=-(1 << 63), lt=1 << 63)]
Source = Annotated[str, AtMost(base.MAX_GRAMMAR, least=1)]
Choices = Annotated[list[Annotated[str, AtMost(base.MAX_GRAMMAR)]], AtMost(base.MAX_CHOICES)]


def empty(value: Any) -> bool:
    """Whether a value requests nothing: null, false, 0, "", [] or {}."""
    return not value


def _texts(value: Any) -> Any:
    if isinstance(value, str | list):
        return [value] if isinstance(value, str) else value
    raise ValueError("must be a text or a list of texts")


_Stop = Annotated[str, AtMost(base.MAX_STOP)]
_Stops = Annotated[list[_Stop], AtMost(base.MAX_STOPS)]
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
    logit_bias: Annotated[dict[BoundedName, float], AtMost(base.MAX_BIASES)] | None = Field(
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
    stop_token_ids: Annotated[list[Int64], AtMost(base.MAX_STOP_IDS)] | None = None
    allowed_token_ids: Annotated[list[Int64], AtMost(base.MAX_ALLOWED_IDS)] | None = None
    bad_words: Annotated[list[Annotated[str, AtMost(base.MAX_BAD_WORD)]], AtMost(base.MAX_BAD_WORDS)] | None = None
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


DEFAULT_MAX_TOKENS = 16
_FORMS = "must be a text, token ids, or a list of texts or of lists of token ids, and not empty"


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 31 for item in value)


def _prompts(value: Any) -> list[str] | list[list[int]]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [value]
        if len(value) > base.MAX_PROMPTS:
            raise PydanticCustomError("bound", "{told}", {"told": reported(value, base.MAX_PROMPTS)})
        if all(isinstance(item, str) for item in value) or all(_is_ids(item) for item in value):
            return value
    raise ValueError(_FORMS)


_Id = Annotated[int, Field(ge=0, lt=1 << 31)]
_Ids = Annotated[list[_Id], AtMost(base.MAX_IDS, least=1)]
_PromptTexts = Annotated[list[Text], AtMost(base.MAX_PROMPTS, least=1)]
_Lists = Annotated[list[_Ids], AtMost(base.MAX_PROMPTS, least=1)]
Prompts = Annotated[list[Any], BeforeValidator(_prompts, json_schema_input_type=Text | _PromptTexts | _Ids | _Lists)]


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


Role = Literal["system", "developer", "user", "assistant", "tool", "function", "ipython"]


class Message(BodyPart):
    """One message; the chat template also receives all additional fields."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Role
    content: Text | Annotated[list[Text | Object], AtMost(base.MAX_PARTS)] | None = Field(
        None, description="Text, or parts of type text. May be null with tool_calls."
    )
    name: Name | None = None
    tool_calls: Annotated[list[Object], AtMost(base.MAX_CALLS)] | None = None
    tool_call_id: Name | None = None


def _as_messages(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_Messages = Annotated[list[Message], AtMost(base.MAX_MESSAGES, least=1)]
Messages = Annotated[_Messages, BeforeValidator(_as_messages, json_schema_input_type=_Messages | Text)]


class Function(BodyPart):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: Annotated[str, AtMost(base.MAX_NAME, least=1)]
    description: Text | None = None
    parameters: Object | None = None


class Tool(BodyPart):
    """A tool that the model may use."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function


class NamedFunction(BodyPart):
    """The name of a function."""

    name: Name


class NamedTool(BodyPart):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class SomeTools(BodyPart):
    """The tools that may be called (mode auto), or of which one must be (required)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], AtMost(base.MAX_TOOLS)]


class AllowedTools(BodyPart):
    """A choice of some of the tools; the template shows all."""

    type: Literal["allowed_tools"]
    allowed_tools: SomeTools


class Conversation(BodyPart):
    """The input of the chat template."""

    messages: Messages
    tools: Annotated[list[Tool], AtMost(base.MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = Field(None, description="Begin an answer after the last message; default.")
    continue_final_message: bool | None = Field(None, description="Continue the last message instead.")
    chat_template_kwargs: Object | None = Field(None, description="Further variables for the template.")


class ChatRequest(Conversation, Sampled):
    """Complete a conversation."""

    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = Field(None, description="False: at most one tool call.")

    reasoning_effort: Name | None = Field(None, description="A variable of the chat template, where it has one.")

    refused: ClassVar[Refused] = {
        **Sampled.refused,
        "functions": (empty, "use tools"),
        "function_call": (lambda value: value == "none", "use tool_choice"),
        "audio": (empty, "this server answers in text"),
        "modalities": (lambda value: value in ([], ["text"]), "this server answers in text"),
        "web_search_options": (empty, "this server does not search the web"),
        "echo": (empty, "it is for /v1/completions"),
        "best_of": (lambda value: value == 1, "it is for /v1/completions; use n"),
        "chat_template": (empty, "the model's own template is used"),
    }

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    def params(self, **more: Any) -> SamplingParams:
        """Return the sampling parameters; raises InputError or ApiError that names an unsupported field."""
        self.check_stream()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        requested = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(requested, (self.top_logprobs or 0) if self.logprobs else None, **more)
