"""The engine core over a device that samples by itself. Sequences queue and run one at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from llmc.errors import DeviceError, InputError
from llmc.runtime.engine.core import EngineCore, StepOutput, TokenEvent
from llmc.runtime.engine.observer import EngineStats, FinishReason, StepRecord
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.engine.sampling.sampler import SequenceSampler

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan
    from llmc.runtime.engine.sampling.constraints import GrammarConstraint
    from llmc.runtime.executors.generating import GeneratingExecutor

_log = logging.getLogger("llmc")

HOST = (
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens",
    "detokenize", "truncate_prompt_tokens", "output_kind",
)  # fmt: skip
"""Parameters about the text and its end, which the host handles on any device."""


@dataclass(slots=True)
class _Waiting:
    number: int
    prompt: Sequence[int]
    params: SamplingParams
    ends: frozenset[int]
    budget: int
    priority: int
    produced: int = field(default=0)


class SequentialCore(EngineCore):
    """Runs sequences one after another on `executor`, ordered by priority, then arrival.

    If the device fails, only its sequence fails, and the next one reopens the device. A second failure without a token
    in between stops the engine. Parameters that neither device nor host supports raise InputError by name; parameters
    that are not given take the device's defaults.
    """

    def __init__(self, plan: Plan, executor: GeneratingExecutor, vocab_size: int) -> None:
        super().__init__(plan, executor, vocab_size, executor.capacity)
        self._device = executor
        self._queue: list[_Waiting] = []
        self._running: _Waiting | None = None
        self._stream: Generator[int, None, None] | None = None
        self._failed = False

    @property
    def max_num_seqs(self) -> int:
        """Always 1."""
        return 1

    def offers(self, parameter: str) -> bool:
        """Whether the device or the host handles this parameter."""
        return parameter in HOST or parameter in self._device.parameters

    def require_offered(self, params: SamplingParams) -> None:
        """Raise InputError for a parameter that the device lacks."""
        for one in fields(SamplingParams):
            if getattr(params, one.name) not in (one.default, ()) and not self.offers(one.name):
                raise InputError(
                    f"{one.name} is not offered on this device: {self._device.takes} are max_tokens, "
                    f"{', '.join(self._device.parameters)}; leave it out"
                )

    def sampler(
        self, prompt: Sequence[int], params: SamplingParams, end_ids: Sequence[int] = (),
        constraint: GrammarConstraint | None = None, bad_words: Sequence[Sequence[int]] = (),
    ) -> SequenceSampler:  # fmt: skip
        """A sampler with the device's defaults; it chooses no tokens here. Raises what `require_offered` raises."""
        self.require_offered(params)
        return super().sampler(prompt, params.filled(self._device.defaults), end_ids)

    def add(
        self, sequence: int, prompt: Sequence[int], sampler: SequenceSampler, *, priority: int = 0,
        group: int | None = None, adapter: int = 0,
    ) -> None:  # fmt: skip
        """Queue a sequence. `adapter` is ignored: devices that sample by themselves have none."""
        del group, adapter
        params = sampler.params
        ends = frozenset(sampler.end_ids) | frozenset(params.stop_token_ids or ())
        one = _Waiting(sequence, list(prompt), params, ends, self._budget(prompt, params), priority)
        self._queue.append(one)
        self._queue.sort(key=lambda waiting: waiting.priority)  # stable: arrivals stay in order

    def cancel(self, sequence: int) -> None:
        """Cancel a sequence. The device has stopped when this returns."""
        self._queue = [waiting for waiting in self._queue if waiting.number != sequence]
        if self._running is not None and self._running.number == sequence:
            self._end()

    def forget_slots(self) -> None:
        """Do nothing, because no tokens are cached between sequences. Raises RuntimeError while there is work."""
        if self.has_work:
            raise RuntimeError("slots of sequences that run cannot be forgotten")

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits."""
        return self._running is not None or bool(self._queue)

    @property
    def stats(self) -> EngineStats:
        """Current gauges of the only slot."""
        run, compilations = self._running, self.executor.compilations
        live = 0 if run is None else len(run.prompt) + run.produced
        return EngineStats(
            int(run is not None), len(self._queue), 1, 0, live / self.executor.capacity, self.steps,
            compilations.count, len(compilations.at_open),
        )  # fmt: skip

    def step(self) -> StepOutput | None:
        """Generate one token of the running sequence."""
        started = time.perf_counter()
        admitted: tuple[tuple[int, int], ...] = ()
        if self._running is None:
            if not self._queue:
                return None
            self._running = self._queue.pop(0)
            admitted = ((self._running.number, 0),)
        run = self._running
        first = not run.produced
        try:
            event = self._event(run, self._next(run))
            self._failed = False
        except DeviceError as error:
            if self._failed:
                self._forget()
                raise
            self._failed = True
            _log.error("sequence %d failed with its device: %s", run.number, error)
            event = TokenEvent(run.number, None, "error", error=error)
        except BaseException:
            self._forget()
            raise
        executed = time.perf_counter()
        if event.finish_reason is not None:
            self._end()
        self.steps += 1
        tokens = len(run.prompt) if first else 1
        record = StepRecord(
            "prompt" if first else "decode", 1, tokens, 0 if first else self.executor.capacity, 1, tokens, 0,
            self._device.executable, 0.0, executed - started, time.perf_counter() - executed, (run.number,), started,
            lengths=(len(run.prompt) + run.produced,),
        )  # fmt: skip
        return StepOutput(record, [event], admitted)

    def _next(self, run: _Waiting) -> int | None:
        if self._stream is None:
            sampling = {name: getattr(run.params, name) for name in self._device.parameters}
            self._stream = self._device.generate(run.prompt, run.budget, sampling)
        return next(self._stream, None)

    def _event(self, run: _Waiting, token: int | None) -> TokenEvent:
        if token is None:
            if run.produced < run.params.min_tokens:
                _log.warning(
                    "the device ended after %d tokens, before min_tokens %d: it has no such parameter",
                    run.produced, run.params.min_tokens,
                )  # fmt: skip
            return TokenEvent(run.number, None, "stop")
        if not 0 <= token < self.vocab_size:
            raise DeviceError(
                f"{self.executor.bundle.path}: the device returned token {token}, which is not in its vocabulary of "
                f"{self.vocab_size}; the bundle is not for this device"
            )
        run.produced += 1
        ends = token in run.ends and run.produced >= run.params.min_tokens
        reason: FinishReason | None = "stop" if ends else "length" if run.produced >= run.budget else None
        return TokenEvent(run.number, token, reason, ends=ends)

    def _end(self) -> None:
        stream, self._running, self._stream = self._stream, None, None
        if stream is not None:
            try:
                stream.close()
            except DeviceError as error:  # its sequence is over; whether the device is, the next one shows
                self._failed = True
                _log.error("the device failed as a sequence ended: %s", error)

    def _forget(self) -> None:
        self._queue.clear()
        self._running = self._stream = None
