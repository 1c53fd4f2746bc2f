"""Chunks of a stream as server-sent events, written with a prefix that all chunks of the stream share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from json import JSONEncoder
from typing import Any, Literal

_json = JSONEncoder(separators=(",", ":")).encode
DONE = b"data: [DONE]\n\n"


def event(data: Mapping[str, Any]) -> bytes:
    """Return one event."""
    return b"data: " + _json(data).encode() + b"\n\n"


def typed_event(data: Mapping[str, Any]) -> bytes:
    """Return one event, with its type also in the field that some clients read."""
    return f"event: {data['type']}\n".encode() + event(data)


class ChunkWriter:
    """Writes the chunks of one response.

    With `usage`, every chunk has the key `usage`, null except in the last. `running` gives the usage of every chunk.
    """

    def __init__(
        self, kind: Literal["chat.completion.chunk", "text_completion"], answer_id: str, created: int, model: str,
        usage: bool, running: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        head = _json({"id": answer_id, "object": kind, "created": created, "model": model})
        self._head = f"data: {head[:-1]},"
        self._fixed = ',"usage":null}\n\n' if usage else "}\n\n"
        self._running = running
        open_, close = ('"delta":{"content":', "},") if kind.startswith("chat") else ('"text":', ",")
        self._before = open_
        self._after = f'{close}"logprobs":null,"finish_reason":null}}]'

    @property
    def _tail(self) -> str:
        return self._fixed if self._running is None else f',"usage":{_json(self._running())}}}\n\n'

    def text(self, index: int, text: str) -> bytes:
        """Return a chunk that only adds text."""
        return f'{self._head}"choices":[{{"index":{index},{self._before}{_json(text)}{self._after}{self._tail}'.encode()

    def choice(self, choice: Mapping[str, Any]) -> bytes:
        """Return a chunk with one arbitrary choice."""
        return f'{self._head}"choices":[{_json(choice)}]{self._tail}'.encode()

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """Return the chunk with the usage and no choice."""
        return f'{self._head}"choices":[],"usage":{_json(usage)}}}\n\n'.encode()
