"""Runs one caller's requests on one engine and collects their outputs, for BundleLLM."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llmc.errors import InputError
from llmc.runtime.engine.engine import LLMEngine
from llmc.runtime.engine.observer import Observer, Observers, StepRecord
from llmc.runtime.engine.requests import OutputBuilder, Request, RequestOutput, Update, text_of
from llmc.runtime.engine.sampling.checks import integer, listed
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.prompts import Prompt, Prompts
from llmc.runtime.startup.opening import EngineOptions, open_engine

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.base import Executor

_FARTHEST = 1 << 62
"""The largest absolute priority."""


class Offline:
    """Runs calls one after another. Not thread-safe.

    `records` holds the last call's steps if `keep_steps` is set. `seed` makes unseeded requests repeatable; each gets
    its own seed.
    """

    def __init__(
        self, bundle: Bundle, executor: Executor, options: EngineOptions, prompts: Prompts, *, keep_steps: bool,
        seed: int | None, observer: Observer | None,
    ) -> None:  # fmt: skip
        self.records: list[StepRecord] = []
        watchers = [o for o in (_Keeper(self.records) if keep_steps else None, observer) if o is not None]
        self.engine: LLMEngine = open_engine(bundle, executor, options, Observers(watchers))
        self._token_text = text_of(bundle.tokenizer if bundle.has_tokenizer else None)
        self._bundle = bundle
        self._end_ids = bundle.eos_token_ids
        self._prompts = prompts
        self._seed = seed
        self._ids = itertools.count()

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None, lora: str | Sequence[str | None] | None,
    ) -> Iterator[tuple[int, Update, RequestOutput]]:  # fmt: skip
        """Yield (prompt index, update, output so far), as BundleLLM.stream does."""
        started = time.perf_counter()
        each, ranks = _per_prompt(params, len(prompts)), _per_priority(priority, len(prompts))
        requested = zip(prompts, each, ranks, self._adapters(lora, len(prompts)), strict=True)
        prepared = [self.engine.prepare(self._request(*one)) for one in requested]
        self.records.clear()
        builders: dict[str, tuple[int, OutputBuilder]] = {}
        owners: dict[int, RequestOutput] = {}
        for index, (prompt, one) in enumerate(zip(prompts, prepared, strict=True)):
            shown = prompt if isinstance(prompt, str) else None
            builder = OutputBuilder(one.request, shown, self._token_text, started)
            builders[one.request.request_id] = (index, builder)
            owners |= dict.fromkeys(self.engine.add(one), builder.output)
        try:
            while any(not b.output.finished for _, b in builders.values()):
                recorded = len(self.records)
                updates = self.engine.step()
                for record in self.records[recorded:]:
                    for sequence in record.requests:
                        if sequence in owners:
                            owners[sequence].steps.append(record)
                for update in updates:
                    if update.error is not None:
                        raise update.error
                    if update.request_id in builders:
                        index, builder = builders[update.request_id]
                        builder.take(update)
                        yield index, update, builder.output
        finally:
            for request_id in builders:
                self.engine.cancel(request_id)

    def _adapters(self, lora: str | Sequence[str | None] | None, count: int) -> list[int]:
        names = [lora] * count if lora is None or isinstance(lora, str) else list(lora)
        if len(names) != count:
            raise InputError(f"{len(names)} names of adapters for {count} prompts")
        return [self._bundle.adapter(name) for name in names]

    def _request(self, prompt: Prompt, params: SamplingParams, priority: int, adapter: int) -> Request:
        number = next(self._ids)
        if self._seed is not None and params.seed is None:
            params = replace(params, seed=self._seed + number)
        return Request(str(number), self._prompts.encode(prompt), params, self._end_ids, priority, adapter)


class _Keeper(Observer):
    def __init__(self, records: list[StepRecord]) -> None:
        self._records = records

    def stepped(self, record: StepRecord) -> None:
        self._records.append(record)


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    found = [p for p in params if isinstance(p, SamplingParams)] if isinstance(params, list | tuple) else None
    if found is None or len(found) != len(params):
        raise InputError(f"sampling_params must be SamplingParams, or one for each prompt, not {params!r:.80}")
    if len(found) != count:
        raise InputError(f"{len(found)} sampling parameters for {count} prompts")
    return found


def _per_priority(priority: Sequence[int] | None, count: int) -> list[int]:
    if priority is None:
        return [0] * count
    found = [integer(-_FARTHEST, _FARTHEST)("priority", rank) for rank in listed("priority", priority)]
    if len(found) != count:
        raise InputError(f"{len(found)} priorities for {count} prompts")
    return found
