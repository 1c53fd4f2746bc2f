"""Conversion of prompts to token ids: texts, ids, dictionaries and conversations."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias

from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.text.chat import ChatTemplate
    from llmc.runtime.text.chat_format import ChatFormat

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]


class Prompts:
    """Encodes prompts for one bundle."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    @cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template; raises InputError if it has none."""
        return self.template_of(self._bundle.chat_template, self._bundle.chat_format)

    def template_of(self, source: str | None, form: ChatFormat | None = None) -> ChatTemplate:
        """Open a chat template for this model. It renders in a child process, because templates are untrusted programs.

        The process starts with the first conversation and ends with the template's `close`. Systems without fork render
        in this process, without limits on time and memory. Raises InputError for None.
        """
        tokens = self._bundle.special_tokens
        if hasattr(os, "fork"):
            from llmc.runtime.text import confined_chat

            return confined_chat.ConfinedTemplate(source, tokens, form, confined_chat.LIMITS)
        from llmc.runtime.text.chat import ChatTemplate

        return ChatTemplate(source, tokens, form)

    def prepare(self) -> None:
        """Load the tokenizer now, so the first text need not wait. Raises ArtifactError for an invalid tokenizer."""
        if self._bundle.has_tokenizer:
            self._bundle.tokenizer.encode("")

    def close(self) -> None:
        """End the chat template's process, if it runs."""
        if "template" in vars(self):
            self.template.close()

    def render(
        self, messages: Sequence[Mapping[str, Any]], template: ChatTemplate | None = None, **how: Any
    ) -> str:  # fmt: skip
        """Render `messages` with a chat template (default: the model's), ready for an answer.

        `how` holds keywords of ChatTemplate.render.
        """
        return (template or self.template).render(**_plain(messages, how))

    async def rendered(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """Render like `render`, without blocking the event loop."""
        return await self.template.rendered(**_plain(messages, how))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, {"prompt": text}, {"prompt_token_ids": ids}, {"messages": [...]} or a list of ids."""
        if isinstance(prompt, str):
            return self._bundle.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return _ids(prompt["prompt_token_ids"])
            if "messages" in prompt:
                return self.encode_chat(self.render(prompt["messages"]))
            if isinstance(prompt.get("prompt"), str):
                return self.encode(prompt["prompt"])
            raise InputError(f"a prompt object needs 'prompt', 'prompt_token_ids' or 'messages', not {sorted(prompt)}")
        return _ids(prompt)

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a rendered conversation, which already contains its special tokens."""
        return self._bundle.tokenizer.encode(text, add_special_tokens=False)


def _plain(messages: Sequence[Mapping[str, Any]], how: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the arguments of ChatTemplate.render to JSON types, for the child process. Raises InputError."""
    from llmc.runtime.text.chat import check_messages, plain_data

    return {"messages": check_messages(messages), **plain_data(how)}


def several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The list of prompts of a call that takes one or several; a text, an object or a list of token ids is one prompt.

    Raises InputError for other types.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise InputError(f"prompts must be a text, a list of token ids, an object, or a list of these: {prompts!r:.80}")
    found: list[Any] = list(prompts)
    return [found] if found and isinstance(found[0], Integral) else found


def conversations(messages: Any) -> list[Any]:
    """The list of conversations of a call that takes one or several. They are not yet validated."""
    listed = not isinstance(messages, str | Mapping) and isinstance(messages, Sequence) and len(messages) > 0
    many = listed and all(isinstance(m, Sequence) and not isinstance(m, str) for m in messages)
    return list(messages) if many else [messages]


def _ids(value: Any) -> list[int]:
    try:
        if isinstance(value, bytes | bytearray | Mapping) or any(isinstance(token, bool) for token in value):
            raise TypeError
        return [index(token) for token in value]
    except TypeError:
        raise InputError(
            f"a prompt is a text or a list of token ids, not {value!r:.80}; a list of prompts goes "
            "where several are taken"
        ) from None
