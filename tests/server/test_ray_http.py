"""What Ray adds to HTTP is taken out again, without Ray; with it: the tests whose servers are `served`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import uvicorn
from starlette.types import Message

from llmc.server.connections import BoundedProtocol
from llmc.server.ray_ingress import AsAlone, middlewares


class Ray:
    """ASGI that says what it is told to, and keeps the headers that it was asked with."""

    def __init__(self, *says: Message) -> None:
        self._says = says
        self.headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers = scope["headers"]
        for message in self._says:
            await send(message)

    def asked(self, *headers: tuple[bytes, bytes]) -> list[Message]:
        """What its client gets."""
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        asyncio.run(AsAlone(self)({"type": "http", "headers": list(headers)}, None, send))  # type: ignore[arg-type]
        return sent


def begins(status: int, kind: bytes) -> Message:
    headers = [(b"content-type", kind), (b"X-Request-ID", b"1")]
    return {"type": "http.response.start", "status": status, "headers": headers}


REST: tuple[Message, ...] = (
    {"type": "http.response.body", "body": b"x", "more_body": True}, {"type": "http.response.body", "body": b""},
)  # fmt: skip


def test_what_it_obeys_or_cannot_read_does_not_reach_it() -> None:
    kept = [(b"x-session-id", b"one"), (b"authorization", b"Bearer \xe9")]
    obeyed = [(b"X-Request-Timeout-Seconds", b"1"), (b"x_request_id", b"1"), (b"serve-multiplexed-model-id", b"1")]
    ray = Ray()
    ray.asked(*kept, *obeyed, (b"x-session-id", b"\xe9"))
    assert ray.headers == kept


@pytest.mark.parametrize(("status", "kind"), [(200, b"text/plain"), (404, b"application/json")])
def test_an_answer_passes_without_its_id(status: int, kind: bytes) -> None:
    head, *rest = Ray(begins(status, kind), *REST).asked()
    assert (head["status"], head["headers"], tuple(rest)) == (status, [(b"content-type", kind)], REST)


@pytest.mark.parametrize(
    ("says", "status", "code"),
    [
        ((begins(404, b"text/plain"), *REST), 404, "unknown_url"),
        ((begins(500, b"text/plain; charset=utf-8"), *REST), 503, "no_replica"),
        ((), 503, "no_replica"),
    ],
)
def test_its_own_errors_and_its_silence_are_error_objects(says: tuple[Message, ...], status: int, code: str) -> None:
    head, body = Ray(*says).asked()
    assert head["status"] == status
    assert json.loads(body["body"])["error"]["code"] == code
    assert (b"retry-after" in dict(head["headers"])) == (status == 503)


def test_uvicorn_is_bounded_and_silent_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn, "Config", uvicorn.Config)
    assert [one.cls for one in middlewares()] == [AsAlone]
    config = uvicorn.Config(Ray(), loop="none", lifespan="off", log_config=None)
    config.load()
    assert config.http_protocol_class is BoundedProtocol
    assert (config.ws_protocol_class, config.server_header, config.encoded_headers) == (None, False, [])
