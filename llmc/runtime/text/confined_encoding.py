"""Tokenizes long texts in child processes, so that a server neither blocks other requests nor keeps the memory.

tokenizers turns 4 MB of text into two million tokens, in seconds and about 800 MB. Even a list of their ids holds the
interpreter for 40 ms.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from llmc.errors import ArtifactError, InputError
from llmc.runtime.confined.limits import ChildLimits
from llmc.runtime.confined.pool import ChildJob, ChildPool, JobError, LimitError
from llmc.runtime.text.encoding_pool import LIMITS, encoding_pool, not_encoded
from llmc.runtime.text.tokenizer import Tokenizer

LONG = 256 << 10
"""Texts with at least this many characters are long. Shorter ones take at most 0.2 s."""
IDLE_S = 5.0
"""The processes end after this many seconds without a long text."""

Encoded = list[tuple[list[int], int]]
"""For each text its ids and their number (Tokenizer.encode_last)."""


class ConfinedEncoder:
    """Tokenizes like Tokenizer, in a child process, for requests on one event loop.

    `tokenizer_json` reads the file's bytes. The process that forks the children starts with the first long text, in 0.5
    s, and ends `idle_s` after the last one, or with `close`.
    """

    def __init__(
        self, tokenizer_json: Callable[[], bytes], limits: ChildLimits = LIMITS, idle_s: float = IDLE_S
    ) -> None:
        self._read = tokenizer_json
        self._limits = limits
        self._idle_s = idle_s
        self._pool: ChildPool | None = None
        self._starting: asyncio.Future[ChildPool] | None = None
        self._jobs = 0
        self._closing: asyncio.TimerHandle | None = None

    async def encode_each(self, texts: Sequence[str], **how: Any) -> Encoded:
        """Encode each text with Tokenizer.encode_last and its keywords `how`. Cancelling kills the child.

        Raises InputError for non-Unicode text or exceeded limits, OverloadedError if too many requests wait.
        """
        if self._closing is not None:
            self._closing.cancel()
        self._jobs += 1
        try:
            pool = await self._started()
            return await pool.arun({"texts": list(texts), "how": how}, _pairs)
        except (LimitError, JobError) as error:
            raise not_encoded(error) from None
        finally:
            self._jobs -= 1
            if not self._jobs:
                loop = asyncio.get_running_loop()
                self._closing = loop.call_later(self._idle_s, loop.run_in_executor, None, self.close)

    async def _started(self) -> ChildPool:
        """The pool. A thread starts it, since a tokenizer.json has megabytes; cancelled waiters do not stop it."""
        if self._pool is not None:
            return self._pool
        if self._starting is None:
            self._starting = asyncio.ensure_future(asyncio.to_thread(self._start))
            self._starting.add_done_callback(self._has_started)
        return await asyncio.shield(self._starting)

    def _start(self) -> ChildPool:
        pool = encoding_pool(self._read(), self._limits)
        pool.start()
        return pool

    def _has_started(self, starting: asyncio.Future[ChildPool]) -> None:
        self._starting = None
        if not starting.cancelled() and starting.exception() is None:
            self._pool = starting.result()

    def close(self) -> None:
        """End the processes, until the next long text."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


async def _pairs(job: ChildJob) -> Encoded:
    return [(ids, count) for ids, count in job.value]


def open_encoder(tokenizer_json: str) -> Callable[[Mapping[str, Any]], Encoded]:
    """Work for a child process: encode {"texts", "how"}."""
    importlib.import_module("tokenizers")
    try:
        tokenizer = Tokenizer(tokenizer_json.encode())
    except ArtifactError as error:
        return partial(_refuse, str(error))
    return lambda job: [tokenizer.encode_here(text, **job["how"]) for text in job["texts"]]


def _refuse(reason: str, _: Mapping[str, Any]) -> Encoded:
    raise InputError(reason)


def require_sound(tokenizer_json: bytes) -> None:
    """Check an untrusted tokenizer.json, in a child process (0.5 s) if reading it may take gigabytes.

    Raises ArtifactError if it exceeds LIMITS, is damaged, or is rejected by bounds.py.
    """
    if not _may_grow_when_read(tokenizer_json):
        Tokenizer(tokenizer_json)
        return
    pool = encoding_pool(tokenizer_json)
    try:
        pool.run({"texts": [""], "how": {"most": None}})
    except (LimitError, JobError):
        raise ArtifactError(
            f"tokenizer.json takes more than {LIMITS.seconds:g} s or {LIMITS.memory_bytes >> 20} MiB to read; "
            "use another checkpoint"
        ) from None
    except InputError as error:
        raise ArtifactError(str(error)) from None
    finally:
        pool.close()


def _may_grow_when_read(tokenizer_json: bytes) -> bool:
    """Whether reading the file normalises an added token; true for a file of unknown form."""
    try:
        document = json.loads(tokenizer_json)
        if document.get("normalizer") is None:
            return False
        return any(token["normalized"] is not False for token in document.get("added_tokens") or ())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return True
