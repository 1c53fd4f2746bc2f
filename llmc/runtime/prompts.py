"""Prompts as people write them, to token ids: texts, ids, dictionaries, conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from llmc.errors import InputError, LlmcError

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.chat import ChatTemplate

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]


class Prompts:
    """Encodes prompts for one bundle."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    @cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template; raises InputError where it has none."""
        from llmc.runtime.chat import ChatTemplate

        return ChatTemplate(self._bundle.chat_template, self._bundle.special_tokens)

    def prepare(self, has_time: Callable[[], bool]) -> None:
        """Load the tokenizer, and the chat template if there `has_time` then: many a request needs none.

        Raises ArtifactError for a tokenizer that cannot be used; of such a template those hear who use it.
        """
        if self._bundle.has_tokenizer:
            self._bundle.tokenizer.encode("")  # what the first text would wait for
        if has_time():
            with suppress(LlmcError):
                _ = self.template

    def render(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """The chat template's text for `messages`, ready for an answer; `how` as in ChatTemplate.render."""
        return self.template.render(messages, **how)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of {"prompt": text}, {"prompt_token_ids": ids} or {"messages": [...]}, or as given."""
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
        """Token ids of a rendered conversation, which holds its special tokens already."""
        return self._bundle.tokenizer.encode(text, add_special_tokens=False)


def _ids(value: Any) -> list[int]:
    try:
        return [int(t) for t in value]
    except (TypeError, ValueError):
        raise InputError(f"prompt token ids must be a list of integers, not {value!r:.80}") from None
