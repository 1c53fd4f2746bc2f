"""An answer as blocks in their order, which the Responses and the Messages API have: text, reasoning and calls."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from llmc.runtime.text.answer_parser import AnswerParser, AnswerPart, CallArguments, CallStart, Reasoning


def read_more(
    parser: AnswerParser, text: str, finish_reason: str | None, stop_reason: str | int | None
) -> list[AnswerPart]:  # fmt: skip
    """Return the parts of more text. A finish reason ends it; a stop string cuts it, as the limit of tokens does."""
    parts = parser.feed(text)
    if finish_reason is not None:
        parts += parser.flush(cut=finish_reason != "stop" or isinstance(stop_reason, str))
    return parts


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
        self.finish_reason = ""
        self.stop_reason: str | int | None = None
        self._open: Block | None = None

    def feed(self, text: str, finish_reason: str | None, stop_reason: str | int | None) -> Iterator[BlockEvent]:
        """Add text and yield what it changes. A finish reason ends the answer."""
        for part in read_more(self._parser, text, finish_reason, stop_reason):
            yield from self._taken(part)
        if finish_reason is not None:
            self.finish_reason, self.stop_reason = finish_reason, stop_reason
            if self._open is not None:
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
