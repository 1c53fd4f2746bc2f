"""Runs a bundle without a cache: texts in, vectors or scores out, in batches by length on all its streams.

Outputs have vLLM's names.
"""

from __future__ import annotations

import asyncio
import io
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.encoding import Batch, batches
from llmc.errors import InputError, OverloadedError
from llmc.runtime.engine.observer import EngineStats
from llmc.runtime.executors.base import LENGTHS, TOKEN_IDS, TYPE_IDS
from llmc.runtime.executors.encoders import open_encoder, require_outputs
from llmc.runtime.pooling.modules import POOLING, WEIGHTS, Normalize, PoolingDescription, activated, embed, normalised
from llmc.runtime.pooling.tokens import Encoded, Pair, PoolingTokenizer, of_ids

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.encoders import Encoder

Array = NDArray[np.float32]
T = TypeVar("T")
WAITING = 64
"""Default limit of waiting calls, a choice."""


@dataclass
class Statistics:
    """Counters since the bundle was opened."""

    requests: int = 0
    rows: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    """Tokens that graphs computed, including padding."""
    steps: int = 0
    seconds: float = 0.0
    buckets: dict[tuple[int, int], int] = field(default_factory=dict)
    """Steps by batch × tokens, for bundles with executables of fixed shapes."""


@dataclass(frozen=True)
class Pooled:
    """A vector (or scores, [labels]) and the number of tokens read for it."""

    values: Array
    prompt_tokens: int


class Pooler:
    """Embeds or scores with the executables of one bundle. Thread-safe.

    Raises ArtifactError or DeviceError if this host cannot run the bundle, InputError for a bundle that generates.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        self.bundle = bundle
        self.plan = bundle.encode_plan
        self.description = PoolingDescription.parse(bundle.files.read(POOLING), str(bundle.path))
        self._weights = _arrays(bundle)
        self._tokens = (
            PoolingTokenizer(bundle.files.read("tokenizer.json"), self.description) if bundle.has_tokenizer else None
        )
        self.encoder: Encoder = open_encoder(bundle, threads)
        self.statistics = Statistics()
        self._counting = threading.Lock()
        self._tokenising = threading.Lock()
        self._streams: queue.SimpleQueue[int] = queue.SimpleQueue()
        for stream in range(self.encoder.streams):
            self._streams.put(stream)
        self._pool = ThreadPoolExecutor(self.encoder.streams, thread_name_prefix="llmc-encode")

    @property
    def task(self) -> str:
        """ "embed" or "score"."""
        return self.description.task

    def embed(
        self, texts: Sequence[str | list[int]], *, prompt_name: str | None = None, prompt: str | None = None,
        dimensions: int | None = None, cut: int | None = None,
    ) -> list[Pooled]:  # fmt: skip
        """Embed each text or list of token ids, in order.

        `prompt`, or the checkpoint's prompt of a name (default: its default prompt), is prepended to each text.
        `dimensions` keeps that many leading numbers, normalised again if the model's vectors are. `cut` keeps at most
        that many tokens of a text, -1: the model's limit; without it, longer texts raise InputError.
        """
        self._require("embed")
        before = self._prompt(prompt_name, prompt)
        encoded = self._encoded(list(texts), before, cut)
        pooling = self.description.pooling
        skip = 0
        if before and pooling is not None and not pooling.include_prompt and self._tokens is not None:
            skip = self._tokens.prompt_tokens(before)

        def pool(hidden: Array, lengths: NDArray[np.int64]) -> Array:
            return self._shortened(embed(self.description, self._weights, hidden, lengths, skip), dimensions)

        return self._run(encoded, pool)

    def score(self, pairs: Sequence[Pair | list[int]], *, cut: int | None = None) -> list[Pooled]:
        """The scores, [labels], of each pair of texts (query, document), in order. Raises InputError."""
        self._require("score")
        encoded = self._encoded(list(pairs), "", cut)
        return self._run(encoded, lambda logits, _: activated(self.description.activation, logits))

    def warm(self, batch: int, tokens: int) -> None:
        """Run one text of `tokens` tokens in a graph of `batch` texts on every stream, then reset the counters.

        Called before requests come (startup/pool_warming.py).
        """
        text = Encoded([0] * tokens, [0] * tokens)
        for _ in range(self.encoder.streams):  # which take turns
            self._batch(Batch((0,), batch, tokens), [text], lambda out, _: out[:, 0] if out.ndim == 3 else out)
        self.statistics = Statistics()

    def _require(self, task: str) -> None:
        if self.task != task:
            raise InputError(f"{self.bundle.path}: a bundle to {self.task}, not to {task}; use llmc {self.task}")

    def _prompt(self, name: str | None, prompt: str | None) -> str:
        if prompt is not None:
            return prompt
        name = self.description.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.description.prompts:
            known = ", ".join(sorted(self.description.prompts)) or "none"
            raise InputError(f"the model has no prompt {name!r}; it has: {known}")
        return self.description.prompts[name]

    def _encoded(self, given: list[Any], prompt: str, cut: int | None) -> list[Encoded]:
        vocab = self.bundle.size("vocab_size")
        for at, one in enumerate(given):
            if isinstance(one, list) and not all(type(i) is int and 0 <= i < vocab for i in one):
                raise InputError(f"input {at}: token ids are integers from 0 to {vocab - 1}")
        if self._tokens is None:
            if not all(isinstance(one, list) for one in given):
                raise InputError(f"{self.bundle.path}: no tokenizer in the bundle; pass token ids instead of text")
            return [of_ids(one, at, cut, self.description.max_length) for at, one in enumerate(given)]
        with self._tokenising:
            return self._tokens.encode(given, prompt, cut)

    def _run(self, encoded: list[Encoded], pool: Callable[[Array, NDArray[np.int64]], Array]) -> list[Pooled]:
        work = batches([len(e.ids) for e in encoded], self.plan, self.encoder.capabilities.exact)
        found: list[Pooled | None] = [None] * len(encoded)

        def one(batch: Batch) -> None:
            built = self._batch(batch, [encoded[row] for row in batch.rows], pool)
            for row, pooled in zip(batch.rows, built, strict=True):
                found[row] = pooled

        if len(work) == 1:
            one(work[0])
        else:
            list(self._pool.map(one, work))
        with self._counting:
            self.statistics.requests += 1
        return [pooled for pooled in found if pooled is not None]

    def _batch(
        self, batch: Batch, rows: Sequence[Encoded], pool: Callable[[Array, NDArray[np.int64]], Array]
    ) -> list[Pooled]:
        """Run one batch of these rows on the next free stream."""
        stream = self._streams.get()
        began = time.perf_counter()
        try:
            inputs = _inputs(rows, batch, self.encoder.type_ids)
            lengths = inputs[LENGTHS][: len(rows)]
            out = self.encoder.encode(inputs, stream)
            require_outputs(self.bundle, out.shape, self.bundle.size("width"))
            values = pool(out[: len(rows)], lengths)
        finally:
            self._streams.put(stream)
        self._count(batch, int(lengths.sum()), time.perf_counter() - began)
        return [Pooled(value, int(length)) for value, length in zip(values, lengths, strict=True)]

    def _count(self, batch: Batch, tokens: int, seconds: float) -> None:
        with self._counting:
            counted = self.statistics
            counted.rows += len(batch.rows)
            counted.tokens += tokens
            counted.padded_tokens += batch.batch * batch.tokens
            counted.steps += 1
            counted.seconds += seconds
            if not self.encoder.capabilities.exact:
                shape = batch.batch, batch.tokens
                counted.buckets[shape] = counted.buckets.get(shape, 0) + 1

    def _shortened(self, vectors: Array, dimensions: int | None) -> Array:
        if dimensions is None:
            return vectors
        if not 1 <= dimensions <= vectors.shape[-1]:
            raise InputError(
                f"dimensions {dimensions} must be in 1 … {vectors.shape[-1]}, the size of the model's vectors"
            )
        kept = vectors[:, :dimensions]
        return normalised(kept) if isinstance(self.description.modules[-1], Normalize) else kept

    def close(self) -> None:
        """Release the executables, and save verification results."""
        self._pool.shutdown()
        self.encoder.close()
        self.bundle.files.close()


class AsyncPooler:
    """Runs calls of `pooler` in as many threads as there are streams. At most `most_waiting` calls may wait.

    It has the interface that a server needs from an engine: `stats`, `error`, `drain`, `close`.
    """

    error: BaseException | None = None

    def __init__(self, pooler: Pooler, most_waiting: int = WAITING) -> None:
        self.pooler = pooler
        self.draining = False
        self._most, self._streams = most_waiting, pooler.encoder.streams
        self._flying = 0
        self._threads = ThreadPoolExecutor(self._streams, thread_name_prefix="llmc-pool")

    @property
    def stats(self) -> EngineStats:
        """Running and waiting calls; there is no cache."""
        running = min(self._flying, self._streams)
        return EngineStats(running, self._flying - running, self._streams, 0, 0.0, self.pooler.statistics.steps, 0)

    async def run(self, work: Callable[[Pooler], T]) -> T:
        """The result of `work`. Raises its errors, and OverloadedError if too many calls wait or the server drains."""
        if self.draining:
            raise OverloadedError("the server is shutting down; send the request to another one")
        if self._flying >= self._streams + self._most:
            raise OverloadedError(f"{self._most} requests wait already; try again later")
        self._flying += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(self.pooler))
        finally:
            self._flying -= 1

    async def drain(self, timeout_s: float) -> int:
        """Reject new calls and wait up to `timeout_s` for the others; returns how many still run."""
        self.draining = True
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while self._flying and loop.time() < end:
            await asyncio.sleep(min(0.02, max(0.0, end - loop.time())))
        return self._flying

    def close(self, timeout_s: float | None = None) -> bool:
        """Release the pooler after running calls ended; always returns True."""
        del timeout_s
        self._threads.shutdown(cancel_futures=True)
        self.pooler.close()
        return True


@dataclass(frozen=True)
class EmbeddingOutput:
    """A text's vector, `embedding`."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the vector."""
        return len(self.embedding)


@dataclass(frozen=True)
class ScoringOutput:
    """A pair's `score`, the first label's if the model has several; `scores` has all."""

    score: float
    scores: tuple[float, ...]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The output of one text with tokens `prompt_tokens`."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_tokens: int
    finished: bool = True


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The output of one pair of texts with tokens `prompt_tokens`."""

    request_id: str
    outputs: ScoringOutput
    prompt_tokens: int
    finished: bool = True


def embeddings(
    pooler: Pooler, prompts: str | list[int] | Sequence[str | list[int]], **how: Any
) -> list[EmbeddingRequestOutput]:
    """Embed one text, several, or token ids; `how` holds keywords of `Pooler.embed`."""
    alone = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
    given: list[Any] = [prompts] if alone else list(prompts)
    found = pooler.embed(given, **how) if given else []
    return [
        EmbeddingRequestOutput(str(at), EmbeddingOutput(one.values.tolist()), one.prompt_tokens)
        for at, one in enumerate(found)
    ]


def scores(
    pooler: Pooler, queries: str | Sequence[str], documents: str | Sequence[str], cut: int | None = None
) -> list[ScoringRequestOutput]:
    """Score each pair: one query for all documents, or one each. Raises InputError if the numbers do not match."""
    given = paired(queries, documents)
    return [
        ScoringRequestOutput(
            str(at), ScoringOutput(float(one.values[0]), tuple(one.values.tolist())), one.prompt_tokens
        )
        for at, one in enumerate(pooler.score(given, cut=cut) if given else [])
    ]


def paired(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[Pair]:
    """The pairs of texts. Raises InputError unless there is one query, or one per document."""
    second = [documents] if isinstance(documents, str) else list(documents)
    first = [queries] if isinstance(queries, str) else list(queries)
    first = first * len(second) if len(first) == 1 else first
    if len(first) != len(second):
        raise InputError(f"{len(first)} queries for {len(second)} documents; give one query, or one for each")
    return list(zip(first, second, strict=True))


def _inputs(rows: Sequence[Encoded], batch: Batch, typed: bool) -> dict[str, NDArray[np.int64]]:
    """Inputs right-padded with zeros; rows that only fill the bucket have one token."""
    ids = np.zeros((batch.batch, batch.tokens), np.int64)
    types, lengths = np.zeros_like(ids), np.ones(batch.batch, np.int64)
    for at, row in enumerate(rows):
        lengths[at] = length = len(row.ids)
        ids[at, :length], types[at, :length] = row.ids, row.types
    return {TOKEN_IDS: ids, LENGTHS: lengths, **({TYPE_IDS: types} if typed else {})}


def _arrays(bundle: Bundle) -> Mapping[str, Array]:
    if WEIGHTS not in bundle.manifest.files:
        return {}
    with np.load(io.BytesIO(bundle.files.read(WEIGHTS)), allow_pickle=False) as stored:
        return {name: np.asarray(stored[name], np.float32) for name in stored.files}
