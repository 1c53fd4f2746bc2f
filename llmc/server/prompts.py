"""Convert request prompts to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmc.runtime.text.confined_encoding import LONG
from llmc.server.aside import aside, unless_disconnected
from llmc.server.errors import ApiError, bad_request

if TYPE_CHECKING:
    from fastapi import Request

    from llmc.buckets.limits import Limits
    from llmc.runtime.text.confined_encoding import Encoded
    from llmc.server.protocol.requests import CompletionRequest, Message, Tool
    from llmc.server.state import Served


async def completion_prompts(request: Request, served: Served, body: CompletionRequest) -> list[list[int]]:
    """Return the token ids of every prompt. Raises InputError for invalid Unicode, else what `fitting` raises."""
    prompts, keep = body.prompt, body.truncate_prompt_tokens
    if isinstance(prompts[0], str):
        return await fitting(request, served, prompts, body.add_special_tokens is not False, keep)
    return [truncated(served, ids, keep) for ids in prompts]


async def fitting(
    request: Request, served: Served, texts: Sequence[str], add_special_tokens: bool, keep: int | None,
    field: str = "prompt",
) -> list[list[int]]:  # fmt: skip
    """Return the ids of `texts`, each `truncated`; refuses certainly too long ones before tokenizing."""
    most = served.limits.longest_prompt if keep in (None, -1) else keep
    if keep is None:
        await aside(request, sum(map(len, texts)), lambda: check_lengths(served, texts, field))
    found = await encode_each(request, served, texts, add_special_tokens, most, shortened=keep is not None)
    return [truncated(served, ids, keep, field, count) for ids, count in found]


async def encode_each(
    request: Request, served: Served, texts: Sequence[str], add_special_tokens: bool, most: int | None,
    shortened: bool = False,
) -> Encoded:  # fmt: skip
    """Return the token ids and token count of each text.

    Of more than `most` tokens, returns the last `most` if `shortened`, otherwise no ids. Long texts are tokenized in
    another process.
    """
    how: dict[str, Any] = {"most": most, "add_special_tokens": add_special_tokens, "shortened": shortened}
    bounds, size = served.tokenizer.bounds, sum(map(len, texts))
    if size >= LONG or not bounds.fits(size):
        return await unless_disconnected(request.receive, served.encoder.encode_each(texts, **how))
    return await aside(
        request, bounds.cost(size), lambda: [served.tokenizer.encode_last(text, **how) for text in texts]
    )


def check_lengths(served: Served, texts: Sequence[str], field: str = "prompt") -> None:
    """Raise ApiError for a text that is too long whatever its tokens are, without tokenizing it."""
    longest, width = served.limits.longest_prompt, served.tokenizer.width
    for text in texts:
        if width is None or 4 * len(text) <= longest:  # a character has at most 4 bytes, and a token at least one
            continue
        least = width.least_tokens(text)
        if least > longest:
            what = f"it has {len(text)} characters, which are at least {least} tokens"
            raise _too_long(served.limits, what, field)


def truncated(
    served: Served, ids: list[int], keep: int | None, field: str = "prompt", count: int | None = None
) -> list[int]:
    """Return the last `keep` ids (None: all; -1: as many as the model takes).

    Raises ApiError, naming the limit, for a prompt that is too long or empty. `field` is its source; `ids` are the last
    of `count`, or empty if there are too many.
    """
    longest = served.limits.longest_prompt
    if keep == 0:
        raise bad_request(
            "truncate_prompt_tokens 0 leaves no prompt; keep at least one token", "truncate_prompt_tokens"
        )
    if keep is not None:
        ids = ids[-(longest if keep == -1 else keep) :]
    length = count if count is not None and keep is None else len(ids)
    if not length:
        raise bad_request("the prompt is empty: it has no token", field)
    if length > longest:
        raise _too_long(served.limits, f"it has {length} tokens", field)
    return ids


def _too_long(limits: Limits, what: str, field: str) -> ApiError:
    # litellm looks for the words "maximum context length is N tokens", langchain-openai for "prompt is too long"
    message = (
        f"the prompt is too long: {what}; this model's maximum context length is {limits.max_model_len} tokens, "
        f"prompt and answer together, and a prompt may have at most {limits.longest_prompt}"
    )
    return bad_request(message, field, "context_length_exceeded")


async def render(
    request: Request, served: Served, messages: Sequence[Message], tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool | None = None, continue_final_message: bool | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """Apply the chat template.

    Raises InputError for messages that it refuses, ApiError without a template or one that shows tools.
    """
    template = served.chat_template
    if template is None:
        raise bad_request("this model has no chat template: use /v1/completions with a prompt", "messages")
    if tools and not takes_tools(served):
        raise bad_request("this model's chat template does not take tools", "tools")
    if continue_final_message and add_generation_prompt:
        raise bad_request("continue_final_message is not allowed with add_generation_prompt", "continue_final_message")
    plain = await aside(
        request, len(messages) * _MESSAGE_SIZE, lambda: [message.model_dump(exclude_unset=True) for message in messages]
    )
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    shown = [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None
    rendering = template.rendered(
        plain, add_generation_prompt=add_generation_prompt, tools=shown, variables=variables
    )  # fmt: skip
    text = await unless_disconnected(request.receive, rendering)
    return _left_open(text, plain[-1]) if continue_final_message else text


_MESSAGE_SIZE = 32
"""Characters that take as long to check as converting one message to plain data."""


def takes_tools(served: Served) -> bool:
    """Whether the chat template shows tools to the model."""
    return served.chat_template is not None and "tools" in served.chat_template.source


def _left_open(text: str, last: Mapping[str, Any]) -> str:
    content = last.get("content")
    if not isinstance(content, str) or not content.strip():
        raise bad_request("continue_final_message needs a last message with text", "continue_final_message")
    for written in (content, content.strip()):
        index = text.rfind(written)
        if index >= 0:
            return text[: index + len(written)]
    raise bad_request("the chat template changes the last message: it cannot be continued", "continue_final_message")
