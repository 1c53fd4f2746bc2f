"""One streamed completion at a time, for what a load generator does not do: leave early, or watch a swap."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit


class StreamError(Exception):
    """The answer is not a whole stream; `kind` says how, as in "http 503", "error event" or "truncated"."""

    def __init__(self, kind: str, said: bytes = b"") -> None:
        super().__init__(f"{kind} {said.decode(errors='replace')}")
        self.kind = kind


def completion(url: str, prompt: str | list[int], tokens: int, timeout: float = 300.0) -> Iterator[float]:
    """When each event with text came (time.monotonic()). Raises StreamError, OSError and http.client.HTTPException.

    `timeout`: seconds for the connection and between two events.
    """
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise StreamError(f"http {answer.status}", answer.read(300))
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b'data: {"error"'):
                raise StreamError("error event", line)
            if line.startswith(b"data: {"):
                yield time.monotonic()
    finally:
        connection.close()
    raise StreamError("truncated")


def prompt_ids(draw: random.Random, tokens: int) -> list[int]:
    """A prompt of random token ids, which any vocabulary of 1,000 has."""
    return draw.choices(range(100, 1000), k=tokens)
