"""One request to an OpenAI-compatible endpoint, and the clockwork of its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from llmc.bench.loadtest.http import ProtocolError, Site, TruncatedError, exchange
from llmc.bench.loadtest.outcome import Failure, Outcome


class EventParser:
    """Finds the data of server-sent events (HTML standard, 9.2), wherever pieces were cut. Comments and other fields
    are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that `piece` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        found = []
        for ended in lines:
            line = ended.removesuffix(b"\r")
            if not line:
                if self._data:
                    found.append(b"\n".join(self._data))
                    self._data.clear()
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        return found


Endpoint = Literal["completions", "chat"]
Prompt = str | list[int]

PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
WHOLE = ("stop", "length", "tool_calls", "function_call", "content_filter", "eos_token")
"""Finish reasons of an answer that is whole."""
PATIENCE_S = 30.0
"""Seconds that a plain request may take."""
KEPT = 16 << 10
"""Bytes kept of an answer that is no stream, for its message."""
SHOWN = 200
"""Characters of a server's message that are shown."""


@dataclass(frozen=True)
class Caller:
    """Sends requests that differ in nothing but prompt and lengths. `extra` is merged into every body."""

    site: Site
    model: str
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        found = {"content-type": "application/json", "user-agent": "llmc-bench"}
        return found | ({"authorization": f"Bearer {self.api_key}"} if self.api_key else {})

    def body(self, prompt: Prompt, max_tokens: int) -> bytes:
        """The request as JSON."""
        asked: dict[str, Any] = {"model": self.model}
        if self.endpoint == "chat":
            asked["messages"] = [{"role": "user", "content": prompt}]
        else:
            asked["prompt"] = prompt
        asked |= {"max_tokens": max_tokens, "temperature": self.temperature, "stream": True}
        asked["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            asked["ignore_eos"] = True
        return json.dumps(asked | dict(self.extra)).encode()

    async def call(self, outcome: Outcome, prompt: Prompt, began: float) -> Outcome:
        """Send one request and fill in `outcome`, whose times count from `began` (time.perf_counter()).

        Raises only when cancelled; any other error becomes the outcome's failure.
        """
        body = self.body(prompt, outcome.asked_output)
        reply = _Reply(outcome, began)
        outcome.sent_s = perf_counter() - began
        try:
            async with asyncio.timeout(self.timeout_s):
                await exchange(self.site, "POST", PATHS[self.endpoint], self.headers, body, reply)
            outcome.failure = reply.verdict()
        except TimeoutError:
            outcome.failure = Failure("timeout", f"not whole after {self.timeout_s:g} s")
        except (TruncatedError, ProtocolError, OSError) as error:
            outcome.failure = reply.broken(error)
        outcome.ended_s = perf_counter() - began
        return outcome

    async def ask(self, method: str, path: str, content: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """The status and JSON body (None: it is none) of a plain request. Raises OSError, also for a broken answer."""
        whole = _Whole()
        patience = min(self.timeout_s, PATIENCE_S)
        body = b"" if content is None else json.dumps(content).encode()
        try:
            async with asyncio.timeout(patience):
                await exchange(self.site, method, path, self.headers, body, whole)
        except TruncatedError:
            raise OSError("the connection was closed before the answer was whole") from None
        except ProtocolError as error:
            raise OSError(f"the answer is not HTTP/1.1: {error}") from None
        except TimeoutError:
            raise OSError(f"no answer in {patience:g} s") from None
        return whole.status, _json(bytes(whole.data))


class _Whole:
    """An answer that is kept."""

    def __init__(self) -> None:
        self.status = 0
        self.data = bytearray()

    def connected(self, now: float) -> None:
        pass

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status

    def body(self, data: bytes, now: float) -> None:
        self.data += data


class _Reply:
    """A streamed answer, while it comes."""

    def __init__(self, outcome: Outcome, began: float) -> None:
        self._outcome = outcome
        self._began = began
        self._status = 0
        self._streams = False
        self._headers: Mapping[str, str] = {}
        self._events = EventParser()
        self._kept = bytearray()
        self._done = False
        self._failure: Failure | None = None

    def connected(self, now: float) -> None:
        self._outcome.connected_s = now - self._began

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        self._headers = headers
        self._streams = status == 200 and headers.get("content-type", "").startswith("text/event-stream")

    def body(self, data: bytes, now: float) -> None:
        if not self._streams:
            self._kept += data[: KEPT - len(self._kept)]
            return
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self._done = True
            else:
                self._event(event, now - self._began)

    def _event(self, data: bytes, at: float) -> None:
        event = _json(data)
        if not isinstance(event, dict) or "error" in event:
            self._failure = self._failure or Failure("error event", message_of(event, data))
            return
        try:
            self._take(event, at)
        except (AttributeError, KeyError, TypeError):
            self._failure = self._failure or Failure("error event", f"not a chunk of OpenAI's: {message_of({}, data)}")

    def _take(self, event: dict[str, Any], at: float) -> None:
        choices = event.get("choices")
        if choices:
            choice = choices[0]
            if _has_text(choice):
                self._outcome.text_s.append(at)
            reason = choice.get("finish_reason")
            if reason is not None:
                self._outcome.finish_reason = str(reason)
        usage = event.get("usage")
        if usage:
            self._outcome.prompt_tokens = _count(usage.get("prompt_tokens"))
            self._outcome.output_tokens = _count(usage.get("completion_tokens"))
            self._outcome.cached_tokens = _count((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))

    def verdict(self) -> Failure | None:
        """What is wrong with the answer now that it ended."""
        if self._status != 200:
            message = message_of(_json(bytes(self._kept)), bytes(self._kept))
            return Failure(f"http {self._status}", message, _seconds(self._headers.get("retry-after")))
        if not self._streams:
            kind = self._headers.get("content-type", "no content type")
            return Failure("not a stream", f"the answer is {kind}, not text/event-stream")
        if self._failure is not None:
            return self._failure
        reason = self._outcome.finish_reason
        if reason is not None and reason not in WHOLE:
            return Failure(f"finished by {reason[:20]}", f"the server ended the answer by {reason[:SHOWN]!r}")
        if not self._done and reason is None:
            return Failure("truncated", "the stream ended without a finish reason and without [DONE]")
        return None

    def broken(self, error: Exception) -> Failure:
        """The failure that a broken connection means, by the progress of the answer."""
        if self._failure is not None:
            return self._failure
        if self._streams and self._done:
            return self.verdict() or Failure("truncated", "the connection broke after [DONE]")
        if isinstance(error, ProtocolError):
            return Failure("not a stream", f"the answer is not HTTP/1.1: {str(error)[:SHOWN]}")
        if self._status == 0:
            reason = "closed without an answer" if isinstance(error, TruncatedError) else reason_of(error)
            return Failure("no connection", reason)
        return Failure("truncated", f"the answer broke off after {len(self._outcome.text_s)} pieces of text")


def reason_of(error: Exception) -> str:
    """An OSError in a few words, without numbers and addresses."""
    if isinstance(error, OSError) and error.strerror and error.errno is not None and error.errno > 0:
        import os

        return os.strerror(error.errno)
    return str(error)[:SHOWN] or type(error).__name__


def message_of(answer: Any, data: bytes) -> str:
    """What an error says: OpenAI's {"error": {"message"}}, FastAPI's {"detail"}, or its first characters."""
    found = answer.get("error", answer.get("detail", answer.get("message"))) if isinstance(answer, dict) else None
    if isinstance(found, dict):
        found = found.get("message")
    text = found if isinstance(found, str) else data.decode("utf-8", "replace")
    return " ".join(text.split())[:SHOWN]


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return bool(
        delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
    )


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _count(value: object) -> int | None:
    return value if type(value) is int else None


def _seconds(text: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, is not read."""
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
