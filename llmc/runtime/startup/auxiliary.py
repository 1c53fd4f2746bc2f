"""Run the auxiliary graphs (buckets/capture/auxiliary.py) through the serving functions during warm-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.buckets.capture.auxiliary import SAMPLING, auxiliary
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
"""Prompt tokens per step on an executor that takes any length."""
MOVED_BYTES = 256 << 20
"""Maximum bytes of prefix tensors that are moved to the host and back."""


@dataclass(frozen=True)
class AuxiliaryRun:
    """One auxiliary run: its name, its seconds, and the error it raised, if any."""

    name: str
    seconds: float
    error: Exception | None = None


class AuxiliaryWarming:
    """The auxiliary runs of a plan, over an engine of it; `run` does all `len` of them in order.

    It omits kinds of sampling that the engine refuses. Afterwards the slots hold arbitrary content.
    """

    def __init__(self, engine: LLMEngine, plan: Plan) -> None:
        self._engine, self._executor, self._plan = engine, engine.core.executor, plan
        self._runs = list(self._all())

    def __len__(self) -> int:
        return len(self._runs)

    def run(self) -> Iterator[AuxiliaryRun]:
        """Do the next run for each item requested."""
        for name, run in self._runs:
            began = time.perf_counter()
            error = None
            try:
                run()
            except Exception as e:  # noqa: BLE001 - the caller reports it with the run's name
                error = e
            yield AuxiliaryRun(name, time.perf_counter() - began, error)

    def _all(self) -> Iterator[tuple[str, Callable[[], object]]]:
        if isinstance(self._executor, GeneratingExecutor):
            return  # this device samples and moves nothing
        needed = auxiliary(self._plan, self._executor.bundle.sample_top_k)
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
        """Copy a prefix within the device, and to the host and back, as the engine does.

        A prefix that is too large for the host copy stays on the device; nothing is moved if no prompt is this long.
        """
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
        """Run a prompt of `length` tokens in a slot, in the scheduler's chunks."""
        if self._executor.capabilities.exact:
            spans = [(start, min(start + PIECE, length)) for start in range(0, length, PIECE)]
            steps = [exact("prompt", [slot], [[0] * (end - start)], [start]) for start, end in spans]
        else:
            parts = prefill_path(self._plan, [length])
            steps = [pad(p.bucket, [slot], [[0] * (end - start)], [start]) for p in parts for start, end in p.spans]
        for step in steps:
            self._executor.run(step)


def sampling_params(kind: str, has_text: bool = True) -> SamplingParams:
    """Return SAMPLING[`kind`] as request parameters; without a tokenizer, bad words are left out."""
    given: dict[str, Any] = dict(SAMPLING[kind])
    if not has_text:
        given.pop("bad_words", None)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    return SamplingParams(**given)
