"""An answer as blocks in their order, which the Responses and the Messages API have: text, reasoning and calls."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from llmc.runtime.text.answer_parser import AnswerParser, AnswerPart, CallArguments, CallStart, Reasoning


def cut(finish_reason: str, stop_reason: str | int | None) -> str:
    """Return how the text ended for its parser: a stop string cuts it, as the limit of tokens does."""
    return "stop string" if isinstance(stop_reason, str) else finish_reason


@dataclass
class Block:
    """A part of an answer in its order: text, reasoning, or a call with its JSON arguments as text."""

    index: int
    kind: Literal["text", "reasoning", "call"]
    name: str = ""
    text: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:24])


@dataclass(frozen=True)
class BlockEvent:
    """A block begins, grows by `text`, or ends."""

    what: Literal["begin", "add", "end"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one answer, as its text arrives."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def feed(self, text: str, ended: str | None = None) -> Iterator[BlockEvent]:
        """Add text and yield what it changes. `ended` is the finish reason of an answer that is whole."""
        parts = self._parser.feed(text)
        if ended is not None:
            parts += self._parser.flush(cut=ended != "stop")
        for part in parts:
            yield from self._taken(part)
        if ended is not None and self._open is not None:
            yield BlockEvent("end", self._open)
            self._open = None

    @property
    def calls(self) -> bool:
        """Whether the answer has called a function."""
        return any(block.kind == "call" for block in self.blocks)

    def _taken(self, part: AnswerPart) -> Iterator[BlockEvent]:
        kind: Literal["text", "reasoning", "call"] = "reasoning" if isinstance(part, Reasoning) else "text"
        if isinstance(part, CallStart | CallArguments):
            kind = "call"
        if self._open is None or self._open.kind != kind or isinstance(part, CallStart):
            if self._open is not None:
                yield BlockEvent("end", self._open)
            name = part.name if isinstance(part, CallStart) else ""
            self._open = Block(len(self.blocks), kind, name)
            self.blocks.append(self._open)
            yield BlockEvent("begin", self._open)
        if not isinstance(part, CallStart):
            self._open.text += part.text
            yield BlockEvent("add", self._open, part.text)
