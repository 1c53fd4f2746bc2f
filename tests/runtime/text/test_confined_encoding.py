"""Long texts, tokenised in a child: the ids are the tokenizer's, and what it takes is bounded and given back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest

from llmc.errors import InputError
from llmc.runtime.confined.limits import ChildLimits
from llmc.runtime.text.confined_encoding import ConfinedEncoder
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.testing import toy
from tests.timing import until

HOW: dict[str, Any] = {"most": 5, "add_special_tokens": True, "shortened": True}


def _file() -> bytes:
    return toy.tokenizer_json().encode()


@contextlib.asynccontextmanager
async def encoder(read: Callable[[], bytes] = _file, **options: Any) -> AsyncIterator[ConfinedEncoder]:
    opened = ConfinedEncoder(read, **options)
    try:
        yield opened
    finally:
        opened.close()


def processes() -> list[int]:
    return [one.pid for one in psutil.Process().children(recursive=True)]


def cpu_seconds() -> float:
    """What these processes have computed for."""
    return sum(one.cpu_times().user for one in psutil.Process().children(recursive=True))


@pytest.mark.parametrize("most", [None, 3, 100_000])
@pytest.mark.parametrize("shortened", [True, False])
def test_it_says_what_the_tokenizer_says(most: int | None, shortened: bool) -> None:
    texts = ["abc " * 5000, "", "z"]
    how = {"most": most, "add_special_tokens": False, "shortened": shortened}

    async def requested() -> object:
        async with encoder() as opened:
            return await opened.encode_each(texts, **how)

    here = Tokenizer(_file())
    assert asyncio.run(requested()) == [here.encode_last(text, **how) for text in texts]


def test_text_that_is_not_unicode_is_refused_in_the_tokenizers_words() -> None:
    async def requested() -> None:
        async with encoder() as opened:
            await opened.encode_each(["a\ud800"], **HOW)

    with pytest.raises(InputError, match="lone surrogate at character 1"):
        asyncio.run(requested())


@pytest.mark.parametrize(
    ("limits", "words"),
    [(ChildLimits(seconds=0.05), "0.05 s of processor time"), (ChildLimits(memory_bytes=16 << 20), "16 MiB of memory")],
    ids=["time", "memory"],
)
def test_beyond_a_limit_it_is_an_error_that_names_it_and_the_next_text_is_tokenised(
    limits: ChildLimits, words: str
) -> None:
    async def requested() -> None:
        async with encoder(limits=limits) as opened:
            with pytest.raises(InputError, match=f"cannot be tokenised: it takes more than {words}; send a shorter"):
                await opened.encode_each(["abc " * 1_000_000], **HOW)
            ((ids, count),) = await opened.encode_each(["abc"], **HOW)
            assert len(ids) == count == 3

    asyncio.run(requested())


def test_when_nobody_requests_any_more_its_processes_end_and_the_next_text_starts_them_again() -> None:
    before = processes()

    async def requested() -> None:
        async with encoder(idle_s=0.1) as opened:
            for _ in range(2):
                both = await asyncio.gather(*(opened.encode_each([text], **HOW) for text in ("ab", "cde")))
                assert [count for ((_, count),) in both] == [2, 3]
                assert processes() != before
                await asyncio.to_thread(until, lambda: processes() == before)

    asyncio.run(requested())


def test_it_starts_beside_the_event_loop_and_once() -> None:
    """A tokenizer.json may have 17 MB."""
    threads: list[str] = []

    def read() -> bytes:
        threads.append(threading.current_thread().name)
        return _file()

    async def requested() -> None:
        async with encoder(read) as opened:
            gone = asyncio.ensure_future(opened.encode_each(["a"], **HOW))
            await asyncio.sleep(0)
            gone.cancel()
            await asyncio.gather(*(opened.encode_each([text], **HOW) for text in ("ab", "cde")))

    asyncio.run(requested())
    assert len(threads) == 1 and threads != [threading.main_thread().name]


def test_who_leaves_takes_the_child_along() -> None:
    async def requested() -> None:
        async with encoder() as opened:
            await opened.encode_each(["a"], **HOW)
            spent = cpu_seconds()
            waiting = asyncio.ensure_future(opened.encode_each(["abc " * 1_000_000], **HOW))
            await asyncio.to_thread(until, lambda: cpu_seconds() > spent + 0.05)
            busy = set(processes())
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.to_thread(until, lambda: len(set(processes()) & busy) < len(busy))
            assert (await opened.encode_each(["abc"], **HOW))[0][1] == 3

    asyncio.run(requested())
