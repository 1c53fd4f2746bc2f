"""Long texts are tokenised in child processes: a server's way, which holds up nobody else and keeps no memory.

Of a text of 4 MB tokenizers make two million tokens, in seconds and some 800 MB; a list of their ids alone holds the
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
"""Characters from which on a text is long; shorter ones take at most 0.2 s."""
IDLE_S = 5.0
"""Seconds without a long text after which the processes end."""

Encoded = list[tuple[list[int], int]]
"""Of each text its ids and their number, see Tokenizer.encode_last."""


class ConfinedEncoder:
    """Tokenises as Tokenizer does, in a child, for requests on one event loop.

    `tokenizer_json` reads the file's bytes. The process that children come from starts with a long text, which takes
    0.5 s, and ends `idle_s` after the last, or with `close`.
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
        """Each text by Tokenizer.encode_last, which takes `how`; cancelling kills the child.

        Raises InputError for text that is not Unicode or goes beyond the limits, OverloadedError where too many wait.
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
        """The pool; a thread starts it, because a tokenizer.json has megabytes. Who leaves meanwhile stops no start."""
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
    """Work for a child: {"texts", "how"}."""
    importlib.import_module("tokenizers")
    try:
        tokenizer = Tokenizer(tokenizer_json.encode())
    except ArtifactError as error:
        return partial(_refuse, str(error))
    return lambda job: [tokenizer.encode_here(text, **job["how"]) for text in job["texts"]]


def _refuse(reason: str, _: Mapping[str, Any]) -> Encoded:
    raise InputError(reason)


def require_sound(tokenizer_json: bytes) -> None:
    """Read a tokenizer.json of whatever origin; in a child process, in half a second, where reading may take gigabytes.

    Raises ArtifactError for one that takes more than LIMITS, that is damaged, or that bounds.py refuses.
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
    """Whether an added token is normalised when the file is read; true of a file that is not as known."""
    try:
        document = json.loads(tokenizer_json)
        if document.get("normalizer") is None:
            return False
        return any(token["normalized"] is not False for token in document.get("added_tokens") or ())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return True
