"""The request of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.server.errors import bad_request
from llmc.server.protocol import bounds
from llmc.server.protocol.base import BodyPart, Refused
from llmc.server.protocol.bounds import AtMost, Name, Object, Text
from llmc.server.protocol.sampling import Int64, Sampled, Whole, empty

Role = Literal["system", "developer", "user", "assistant", "tool", "function", "ipython"]


class Message(BodyPart):
    """One message; the chat template also receives all additional fields."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Role
    content: Text | Annotated[list[Text | Object], AtMost(bounds.MAX_PARTS)] | None = Field(
        None, description="Text, or parts of type text. May be null with tool_calls."
    )
    name: Name | None = None
    tool_calls: Annotated[list[Object], AtMost(bounds.MAX_CALLS)] | None = None
    tool_call_id: Name | None = None


def _messages(value: Any) -> Any:
    """Convert a plain string to one user message."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_Messages = Annotated[list[Message], AtMost(bounds.MAX_MESSAGES, least=1)]
Messages = Annotated[_Messages, BeforeValidator(_messages, json_schema_input_type=_Messages | Text)]


class Function(BodyPart):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: Annotated[str, AtMost(bounds.MAX_NAME, least=1)]
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
    tools: Annotated[list[NamedTool], AtMost(bounds.MAX_TOOLS)]


class AllowedTools(BodyPart):
    """A choice of some of the tools; the template shows all."""

    type: Literal["allowed_tools"]
    allowed_tools: SomeTools


class Conversation(BodyPart):
    """The input of the chat template."""

    messages: Messages
    tools: Annotated[list[Tool], AtMost(bounds.MAX_TOOLS)] | None = None
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
