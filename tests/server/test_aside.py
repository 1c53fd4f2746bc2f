"""Long work goes on beside the event loop, is bounded in number, and ends with its client."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from llmc.buckets.limits import Limits
from llmc.errors import OverloadedError
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.server import aside
from llmc.server.aside import LARGE, MAX_WAITING, SMALL, Lane, SharedWork
from llmc.server.errors import ApiError
from llmc.server.prompts import fitting
from llmc.testing.toy import tokenizer_json
from tests.timing import PATIENCE_S, until


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


def test_a_long_prompt_is_measured_beside_the_event_loop() -> None:
    """Its bytes are counted before it is tokenised: of 4 MB that held up streams for 0.1 s."""
    where: list[str] = []

    def least_tokens(text: str) -> int:
        where.append(threading.current_thread().name)
        return len(text)

    tokenizer = SimpleNamespace(width=SimpleNamespace(least_tokens=least_tokens))
    served: Any = SimpleNamespace(tokenizer=tokenizer, limits=Limits(max_num_seqs=1, max_model_len=32))

    async def one() -> None:
        with pytest.raises(ApiError, match="which are at least 65536 tokens"):
            await fitting(request(asyncio.Event()), served, ["a" * LARGE], True, None)

    asyncio.run(one())
    assert [name.startswith("llmc-long") for name in where] == [True]


def test_a_full_lane_refuses_and_a_client_that_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, go, done = Lane("test", 2), threading.Event(), []
    monkeypatch.setattr(aside, "_long", lane)

    async def crowd() -> None:
        leaves = asyncio.Event()
        one = request(leaves)
        works = [
            asyncio.ensure_future(aside.aside(one, LARGE, lambda i=i: (go.wait(PATIENCE_S), done.append(i))))  # type: ignore[misc]
            for i in range(MAX_WAITING)
        ]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="try again later"):
            await aside.aside(one, LARGE, lambda: None)
        leaves.set()
        ends = await asyncio.gather(*works, return_exceptions=True)
        assert all(isinstance(end, ClientDisconnect) for end in ends)
        go.set()
        assert await aside.aside(request(asyncio.Event()), LARGE, lambda: 5) == 5

    asyncio.run(crowd())
    lane._pool.shutdown()
    assert len(done) == 2  # what had not begun never ran


def test_memory_of_long_work_is_given_back_once_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(aside, "TRIM_S", 0.5)
    monkeypatch.setattr(aside, "trim", lambda: given.append(threading.current_thread().name))
    lane = Lane("test", 1, trims=True)

    async def some() -> None:
        for _ in range(3):
            await lane.run(lambda: None)
        assert not given
        await asyncio.to_thread(until, lambda: given)

    asyncio.run(some())
    assert [name.startswith("llmc-test") for name in given] == [True]


def test_what_many_request_at_once_is_done_once_and_never_before_it_was_requested() -> None:
    begun: list[int] = []
    go = threading.Event()

    def work() -> int:
        begun.append(0)
        go.wait(PATIENCE_S)
        return len(begun)

    async def ask() -> list[int]:
        shared = SharedWork()
        first = asyncio.ensure_future(shared.get(work))
        await asyncio.to_thread(until, lambda: begun)
        others = [asyncio.ensure_future(shared.get(work)) for _ in range(20)]
        await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(first, *others)

    assert asyncio.run(ask()) == [1] + [2] * 20


def test_an_error_is_no_result() -> None:
    async def ask() -> int:
        shared = SharedWork()
        with pytest.raises(ZeroDivisionError):
            await shared.get(lambda: 1 // 0)
        return await shared.get(lambda: 5)

    assert asyncio.run(ask()) == 5


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
