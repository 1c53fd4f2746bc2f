"""Long work goes on beside the event loop, is bounded in number, and ends with its client."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from llmc.errors import OverloadedError
from llmc.runtime.server import aside
from llmc.runtime.server.aside import LANE_THREADS, LARGE, MAX_WAITING, SMALL, Lane
from llmc.runtime.tokenizer import Tokenizer
from tests.toy import tokenizer_json


def request(leaves: asyncio.Event) -> Any:
    async def receive() -> dict[str, str]:
        await leaves.wait()
        return {"type": "http.disconnect"}

    return SimpleNamespace(receive=receive)


def test_short_work_is_done_at_once_and_longer_work_in_two_lanes() -> None:
    def where() -> str:
        return threading.current_thread().name

    async def all_three() -> list[str]:
        one = request(asyncio.Event())
        return [await aside.aside(one, size, where) for size in (SMALL - 1, SMALL, LARGE)]

    here, quick, long = asyncio.run(all_three())
    assert here == threading.current_thread().name
    assert quick.startswith("llmc-quick") and long.startswith("llmc-long")


def test_a_full_lane_refuses_and_a_client_that_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, go, done = Lane("test"), threading.Event(), []
    monkeypatch.setattr(aside, "_long", lane)

    async def crowd() -> None:
        leaves = asyncio.Event()
        one = request(leaves)
        works = [
            asyncio.ensure_future(aside.aside(one, LARGE, lambda i=i: (go.wait(10), done.append(i))))  # type: ignore[misc]
            for i in range(MAX_WAITING)
        ]
        await asyncio.sleep(0.05)
        with pytest.raises(OverloadedError, match="try again later"):
            await aside.aside(one, LARGE, lambda: None)
        leaves.set()
        ends = await asyncio.gather(*works, return_exceptions=True)
        assert all(isinstance(end, ClientDisconnect) for end in ends)
        go.set()
        assert await aside.aside(request(asyncio.Event()), LARGE, lambda: 5) == 5

    asyncio.run(crowd())
    assert len(done) == LANE_THREADS  # what had not begun never ran


@pytest.mark.parametrize("what", ["encode", "decode"])
def test_long_texts_leave_the_interpreter_to_others(what: str) -> None:
    """This thread wakes again and again while another encodes a million characters: with the interpreter held, once."""
    tokenizer = Tokenizer(tokenizer_json().encode())
    text, ids = "hello world " * 80_000, tokenizer.encode("a") * 960_000
    thread = threading.Thread(target=lambda: tokenizer.encode(text) if what == "encode" else tokenizer.decode(ids))
    thread.start()
    wakes = 0
    while thread.is_alive():
        thread.join(0.001)
        wakes += 1
    assert wakes >= 10
