"""The pieces below the routes: chunks, event streams, and work that ends with its client."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.requests import ClientDisconnect

from llmc.server.aside import unless_disconnected
from llmc.server.generation import EventStream
from llmc.server.protocol.answers import ChunkWriter
from tests.timing import least_cpu_seconds


@pytest.mark.parametrize("kind", ["chat.completion.chunk", "text_completion"])
@pytest.mark.parametrize("usage", [False, True])
def test_the_fast_way_writes_what_the_general_way_writes(kind, usage):
    writer = ChunkWriter(kind, 'id"1', 12, "a model", usage)
    for text in ("", "plain", 'q"\\\n\x00', "é😀\u2028"):
        added = {"delta": {"content": text}} if kind.startswith("chat") else {"text": text}
        choice = {"index": 3, **added, "logprobs": None, "finish_reason": None}
        assert writer.text(3, text) == writer.choice(choice)
        whole = {"id": 'id"1', "object": kind, "created": 12, "model": "a model", "choices": [choice]}
        assert json.loads(writer.text(3, text).removeprefix(b"data: ")) == whole | ({"usage": None} if usage else {})


def test_a_chunk_takes_microseconds():
    writer = ChunkWriter("chat.completion.chunk", "chatcmpl-" + "0" * 32, 1 << 31, "a-model", True)
    assert least_cpu_seconds(lambda: [writer.text(0, " token") for _ in range(1000)]) / 1000 < 20e-6


class Wire:
    """The ASGI side of one request, whose client leaves when `gone` is set."""

    def __init__(self):
        self.gone = asyncio.Event()
        self.sent = []

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    @property
    def body(self):
        return b"".join(m["body"] for m in self.sent if m["type"] == "http.response.body")

    @property
    def ended(self):
        return self.sent[-1].get("more_body") is False


def served(events, leave=False):
    """What a stream of `events` sends, and how often it was released."""

    async def serve():
        wire, released, closed = Wire(), [], []

        async def source():
            try:
                async for event in events(wire):
                    yield event
            finally:
                closed.append(True)

        async def send(message):
            await wire.send(message)

        stream = EventStream(source(), lambda: released.append(True))
        async with asyncio.timeout(5):
            await stream({}, wire.receive, send)
        assert (released, closed) == ([True], [True])
        assert len(asyncio.all_tasks()) == 1
        return wire

    return asyncio.run(serve())


def test_an_event_stream_sends_its_head_its_events_and_an_end():
    async def two(wire):
        yield b"a"
        yield b""
        yield b"b"

    wire = served(two)
    head, *rest = wire.sent
    assert (head["type"], head["status"]) == ("http.response.start", 200)
    assert dict(head["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert b"content-length" not in dict(head["headers"])
    assert [m["body"] for m in rest] == [b"a", b"b", b""]
    assert wire.ended


def test_an_event_stream_ends_when_its_client_leaves():
    async def endless(wire):
        yield b"a"
        wire.gone.set()
        await asyncio.Event().wait()

    assert served(endless).body == b"a"


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_event_stream_ends_when_nothing_can_be_sent_any_more(after):
    async def endless(wire):
        async def broken(message):
            raise OSError("broken pipe")

        for index in range(1000):
            if index == after:
                wire.send = broken
            yield b"a"

    assert served(endless).body == b"a" * after


def test_an_error_becomes_the_last_event(caplog):
    caplog.set_level("CRITICAL", "llmc")

    async def faulty(wire):
        yield b"data: {}\n\n"
        raise OSError("/srv/secret")

    wire = served(faulty)
    assert wire.ended
    _, last, _ = wire.body.split(b"\n\n")
    assert list(json.loads(last.removeprefix(b"data: "))) == ["error"]
    assert b"secret" not in wire.body


def test_an_event_stream_that_is_cancelled_releases():
    async def cancelled():
        wire, released = Wire(), []

        async def endless():
            yield b"a"
            await asyncio.Event().wait()

        stream = EventStream(endless(), lambda: released.append(True))
        task = asyncio.create_task(stream({}, wire.receive, wire.send))
        while not wire.body:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return released

    assert asyncio.run(cancelled()) == [True]


class TestUnlessDisconnected:
    def run(self, work, leave=False, cancel=False):
        async def main():
            wire = Wire()
            if leave:
                wire.gone.set()
            task = asyncio.create_task(unless_disconnected(wire.receive, work))
            if cancel:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                task.cancel()
            try:
                return await task
            finally:
                assert len(asyncio.all_tasks()) == 1

        return asyncio.run(main())

    def test_gives_the_result(self):
        async def work():
            return 5

        assert self.run(work()) == 5
        assert self.run(work(), leave=True) == 5  # it was done by then

    def test_raises_what_the_work_raises(self):
        async def work():
            raise ValueError("x")

        with pytest.raises(ValueError, match="x"):
            self.run(work())

    @pytest.mark.parametrize("how", ["leave", "cancel"])
    def test_cancels_the_work_and_waits_for_its_end(self, how):
        ended = []

        async def work():
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended.append(True)

        with pytest.raises(ClientDisconnect if how == "leave" else asyncio.CancelledError):
            self.run(work(), **{how: True})
        assert ended == [True]
