"""Chat templates in child processes with limits on time and memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmc.errors import InputError
from llmc.runtime.confined.limits import ChildLimits
from llmc.runtime.confined.pool import ChildJob, ChildPool, LimitError
from llmc.runtime.text.chat import ChatTemplate
from llmc.runtime.text.chat_format import ChatFormat

LIMITS = ChildLimits(seconds=2.0, memory_bytes=256 << 20)
"""For one conversation. 4,096 short messages take 0.1 s."""


class ConfinedTemplate(ChatTemplate):
    """A ChatTemplate that renders in a child process, which adds 0.3 ms for a short conversation.

    The constructor does not parse the template; `check` does. Exceeding `limits` raises InputError, a full pool
    OverloadedError. The process that forks the children starts with `start` or the first conversation, and ends with
    `close`.
    """

    def __init__(
        self, source: str | None, special_tokens: Mapping[str, str] | None = None, form: ChatFormat | None = None,
        limits: ChildLimits = LIMITS,
    ) -> None:  # fmt: skip
        self.source = self._known(source)
        self._form = form
        options = {"source": source, "special_tokens": dict(special_tokens or {})}
        self._pool = ChildPool(f"{__name__}:open_renderer", options, limits)

    def start(self) -> None:
        """Start the process that forks children, without waiting until it is ready."""
        self._pool.start()

    def check(self) -> None:
        """Raise InputError for a template that does not parse, and find its format."""
        self._form = self._find() if self._form is None else self._form
        try:
            self._pool.run({})
        except LimitError as error:
            raise InputError(f"the chat template cannot be parsed: {error}") from None

    def _find(self) -> ChatFormat:
        try:
            return ChatFormat.of(self._pool.run({"find": True}).value)
        except LimitError:  # rendering the conversation will meet the limit, or not
            return ChatFormat()

    def render(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """Render the prompt like ChatTemplate.render."""
        try:
            return str(self._pool.run({"form": self.form.to_dict(), "messages": messages, **how}).value)
        except LimitError as error:
            raise _beyond(error) from None

    async def rendered(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """Render the prompt without blocking the event loop; cancelling kills the child."""
        try:
            return await self._pool.arun({"form": self.form.to_dict(), "messages": messages, **how}, _text)
        except LimitError as error:
            raise _beyond(error) from None

    def close(self) -> None:
        """End the process that forks children, and the children."""
        self._pool.close()


async def _text(job: ChildJob) -> str:
    return str(job.value)


def _beyond(error: LimitError) -> InputError:
    return InputError(f"the chat template cannot be rendered with these messages: {error}; send fewer or shorter ones")


def open_renderer(source: str, special_tokens: Mapping[str, str]) -> Callable[[Mapping[str, Any]], Any]:
    """Work for a child process: render a conversation, find the format, or only parse for {}.

    Parsing is not bounded either.
    """
    for module in ("jinja2", "jinja2.sandbox", "jinja2.ext"):
        importlib.import_module(module)
    template: ChatTemplate | None = None

    def work(job: Mapping[str, Any]) -> Any:
        nonlocal template
        if template is None:
            template = ChatTemplate(source, special_tokens)
        if "find" in job:
            return template.form.to_dict()
        if not job:
            return None
        how = dict(job)
        if "form" in how:
            template.form = ChatFormat.of(how.pop("form"))
        return template.render(**how)

    return work
