"""One turn of a conversation, for every API that has conversations: from a chat request to its generation."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmc.runtime.text.answer_parser import AnswerParser
from llmc.runtime.text.chat_format import ChatFormat
from llmc.server.generation import Generation, check_room
from llmc.server.prompts import fitting, render
from llmc.server.tool_calls import tool_use

if TYPE_CHECKING:
    from fastapi import Request

    from llmc.server.protocol.chat import ChatRequest
    from llmc.server.state import Served, ServerConfig


@dataclass(frozen=True)
class Turn:
    """A prepared generation: `start` begins it, and `read` returns a new parser of one choice's text.

    `plain`: the text is content, whatever it says.
    """

    start: Coroutine[Any, Any, Generation]
    read: Callable[[], AnswerParser]
    plain: bool


async def prepare(
    request: Request, served: Served, config: ServerConfig, body: ChatRequest, answer_id: str
) -> Turn:  # fmt: skip
    """Render the conversation and decide how the answer is sampled and read.

    Raises InputError and ApiError for what the request, its template or its tools do not allow.
    """
    use = tool_use(served, body)
    recommended = config.recommended(served)
    params = body.params().filled(recommended)
    check_room(served, config, 1, params)
    prompts, text = await conversation(request, served, body, use.tools)
    form = served.chat_format or ChatFormat()
    thinking = form.begins_thinking(text)
    constraint = use.constraint(served, thinking, params.structured_outputs)
    more: dict[str, Any] = {} if constraint is params.structured_outputs else {"structured_outputs": constraint}
    plain = form.thinking is None and use.functions is None and not form.in_channels
    if not plain:
        more["kept_special_ids"] = served.mark_ids
    if more:
        params = body.params(**more).filled(recommended)
    start = Generation.start(
        served, answer_id, prompts, params, body.priority, served.adapter(body.model), request.headers
    )  # fmt: skip
    return Turn(start, lambda: AnswerParser(form, use.functions, thinking, use.limit), plain)


async def conversation(
    request: Request, served: Served, body: ChatRequest, tools: Any
) -> tuple[list[list[int]], str]:  # fmt: skip
    """Return the token ids of the rendered conversation, as the only prompt, and its text."""
    text = await render(
        request, served, body.messages, tools, body.add_generation_prompt, body.continue_final_message, body.variables
    )
    keep = body.truncate_prompt_tokens
    return await fitting(request, served, [text], bool(body.add_special_tokens), keep, "messages"), text
