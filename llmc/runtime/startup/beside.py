"""Running what is warmed beside the buckets (buckets/capture/auxiliary.py), through the functions that serve."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.buckets.capture.auxiliary import SAMPLING, beside
from llmc.buckets.lookup import prefill_path
from llmc.errors import InputError
from llmc.runtime.engine.requests import Request
from llmc.runtime.engine.sampling.batch import sample
from llmc.runtime.engine.sampling.params import SamplingParams, StructuredOutputsParams
from llmc.runtime.executors.generating import GeneratingExecutor
from llmc.runtime.step import exact, pad

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan
    from llmc.runtime.engine.engine import LLMEngine

PIECE = 512
"""Tokens of a prompt that run at once where any number does."""
MOVED_BYTES = 256 << 20
"""Tensors of a prefix that are taken to the host and back, at most."""


@dataclass(frozen=True)
class RanBeside:
    """One of them that ran: what it is, the seconds it took, and the error that was raised."""

    name: str
    seconds: float
    error: Exception | None = None


class BesideWarming:
    """What a plan needs beside its buckets, over an engine of it; `len` of them are run, in order, by `run`.

    A kind of sampling that its engine refuses is none of them. Slots hold anything afterwards.
    """

    def __init__(self, engine: LLMEngine, plan: Plan) -> None:
        self._engine, self._executor, self._plan = engine, engine.core.executor, plan
        self._runs = list(self._all())

    def __len__(self) -> int:
        return len(self._runs)

    def run(self) -> Iterator[RanBeside]:
        """Run each, one for each that is asked for."""
        for name, run in self._runs:
            began = time.perf_counter()
            error = None
            try:
                run()
            except Exception as e:  # noqa: BLE001 - as of a bucket: whoever warms up names it
                error = e
            yield RanBeside(name, time.perf_counter() - began, error)

    def _all(self) -> Iterator[tuple[str, Callable[[], object]]]:
        if isinstance(self._executor, GeneratingExecutor):
            return  # its device samples, and moves nothing
        needed = beside(self._plan, self._executor.bundle.sample_top_k)
        offered = {kind for kind in SAMPLING if self._is_offered(kind)}
        for one in needed.samples:
            if one.kind in offered:
                yield f"sampling: {one.kind}, {one.batch} rows", partial(self._sample, one.batch, one.kind)
        for top in needed.tops:
            yield f"top logits: {top.batch} rows", partial(self._top, top.batch)
        if self._executor.slots > 1:
            for move in needed.moves:
                yield f"move of {move.length} tokens", partial(self._move, move.length)

    def _is_offered(self, kind: str) -> bool:
        try:
            self._engine.prepare(Request("warm-up", [0], self._params(kind)))
        except InputError:
            return False
        return True

    def _params(self, kind: str) -> SamplingParams:
        return sampling_params(kind, has_text=self._engine.tokenizer is not None)

    def _sample(self, batch: int, kind: str) -> None:
        params = self._params(kind)
        prepared = [self._engine.prepare(Request("warm-up", [0], params)) for _ in range(batch)]
        logits = np.zeros((batch, self._engine.core.vocab_size), np.float32)
        sample(logits, [one.samplers[0] for one in prepared])

    def _top(self, batch: int) -> None:
        executor, buckets = self._executor, [b for b in self._plan.buckets if b.batch == batch]
        bucket = min(buckets, key=lambda b: (b.tokens, b.context))
        executor.run_top(
            exact("decode", [0], [[0]], [0]) if executor.capabilities.exact else pad(bucket, [0], [[0]], [0])
        )

    def _move(self, length: int) -> None:
        """As the engine moves a prefix within a device, and to another one and back; one that is too large for the
        second stays on the device, and if no prompt is so long, it is not moved."""
        executor = self._executor
        one = executor.export_prefix(0, 1)
        if length * sum(tensor.nbytes for tensor in one) <= MOVED_BYTES:
            executor.import_prefix(0, [np.repeat(tensor, length, axis=1) for tensor in one])
            executor.copy_prefix(0, 1, length)
            executor.export_prefix(1, length)
        elif length <= self._plan.limits.longest_prompt:
            self._fill(0, length)
            executor.copy_prefix(0, 1, length)

    def _fill(self, slot: int, length: int) -> None:
        """Run a prompt of `length` tokens in a slot, in pieces as the scheduler makes them."""
        if self._executor.capabilities.exact:
            spans = [(start, min(start + PIECE, length)) for start in range(0, length, PIECE)]
            steps = [exact("prompt", [slot], [[0] * (end - start)], [start]) for start, end in spans]
        else:
            parts = prefill_path(self._plan, [length])
            steps = [pad(p.bucket, [slot], [[0] * (end - start)], [start]) for p in parts for start, end in p.spans]
        for step in steps:
            self._executor.run(step)


def sampling_params(kind: str, has_text: bool = True) -> SamplingParams:
    """SAMPLING[`kind`] as parameters of a request; without a tokenizer there are no words that could be bad."""
    given: dict[str, Any] = dict(SAMPLING[kind])
    if not has_text:
        given.pop("bad_words", None)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    return SamplingParams(**given)
