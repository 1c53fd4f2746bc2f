"""A prefill worker: a thread that computes prompts on its own executor and exports their KV cache.

It runs the engine's scheduler, so prompts are batched, chunked and share prefixes as usual. A sequence ends with its
prompt, and its slot retains the prompt for the next one with the same prefix.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.errors import DeviceError
from llmc.runtime.disaggregated.facts import SideFacts
from llmc.runtime.engine.batched_core import step_of
from llmc.runtime.engine.kv_transfer import KVTransfer, Prefilled, Prefiller, PrefillFailed
from llmc.runtime.engine.scheduling import open_scheduler
from llmc.runtime.engine.scheduling.base import SchedulerConfig

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.engine.scheduling.base import ScheduledBatch, Scheduler
    from llmc.runtime.executors.base import Executor

LEAST_BOUND = 2
"""Least number of computed prompts that may wait: one is computed while another waits for its slot."""
OVERTAKE = 64
"""Later arrivals that one step of priority is worth, as in SchedulerConfig."""
_log = logging.getLogger("llmc")


@dataclass(slots=True, eq=False)
class PrefillJob:
    """Prompt `number` of `client`.

    `sequence`: its number in the worker's scheduler, −1 before it has one. `arrived_s` and `began_s` (first step):
    time.perf_counter() seconds. `cached`: prompt tokens from a cached prefix.
    """

    client: WorkerClient
    number: int
    prompt: array[int]
    arrived_s: float
    sequence: int = -1
    began_s: float | None = None
    cached: int = 0


class WorkerClient(Prefiller):
    """A client with at most `bound` prompts that are running or finished but not taken.

    A client that takes nothing therefore delays nobody else, and memory stays bounded. Any thread may call `submit`,
    `cancel` and `take`. `running`, `start` and `deliver` belong to the worker, which calls the last two under its lock.
    """

    def __init__(self, worker: PrefillWorker, bound: int, owns: bool = False) -> None:
        super().__init__(threading.Condition(worker.lock))
        self._worker = worker
        self._bound = bound
        self._owns = owns
        self._jobs: dict[int, PrefillJob] = {}
        """Waiting and running prompts."""
        self._waiting: list[tuple[int, int, PrefillJob]] = []
        self._arrivals = 0
        self.running = 0

    @property
    def longest_prompt(self) -> int:
        return self._worker.longest_prompt

    @property
    def bound(self) -> int:
        return self._bound

    def submit(self, number: int, prompt: Sequence[int], priority: int = 0) -> None:
        """Queue a prompt. It fails if the worker has ended."""
        job = PrefillJob(self, number, array("q", prompt), time.perf_counter())
        with self._changed:
            if self._worker.ended is not None:
                self._came.append(PrefillFailed(number, self._worker.ended, passing=False))
                self._changed.notify_all()
                return
            self._arrivals += 1
            self._jobs[number] = job
            heappush(self._waiting, (self._arrivals + OVERTAKE * priority, self._arrivals, job))
            self._worker.wake.notify()

    def cancel(self, number: int) -> None:
        with self._changed:
            job = self._jobs.pop(number, None)
            if job is not None and job.sequence >= 0:
                self._worker.cancel(job)
                self.running -= 1
            elif job is not None:
                self._waiting = [entry for entry in self._waiting if entry[2] is not job]
                heapify(self._waiting)
            else:
                self._forget(number)
            self._worker.wake.notify()

    @property
    def compilations(self) -> int:
        return self._worker.compilations

    def prepare(self, work: Callable[[Executor], object]) -> None:
        self._worker.do(work)

    def close(self) -> None:
        """Cancel all prompts and leave the worker; close the worker if this client owns it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for number in [*self._jobs]:
                job = self._jobs.pop(number)
                if job.sequence >= 0:
                    self._worker.cancel(job)
            self._waiting.clear()
            self._came.clear()
            self._worker.leave(self)
            self._worker.wake.notify()
        if self._owns:
            self._worker.close()

    @property
    def startable(self) -> bool:
        """Whether a prompt waits and the bound has room for its result."""
        return bool(self._waiting) and self.running + len(self._came) < self._bound

    def start(self) -> PrefillJob:
        """Remove and return its next prompt, which runs from now on."""
        self.running += 1
        return heappop(self._waiting)[2]

    def deliver(self, result: Prefilled | PrefillFailed) -> None:
        """Store the result of a prompt that ran."""
        if self._jobs.pop(result.number, None) is not None:
            self.running -= 1
            self._came.append(result)
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Fail all of its prompts."""
        self._came.extend(PrefillFailed(number, reason, passing=False) for number in self._jobs)
        self._jobs.clear()
        self._waiting.clear()
        self._changed.notify_all()

    def _freed_room(self) -> None:
        self._worker.wake.notify()


class PrefillWorker:
    """Computes prompts on the executor that `open_executor` opens for `bundle` in the worker's thread.

    `min_prefix`: tokens of the shortest prefix that is reused; 0: none. Raises the errors of `open_executor`. `lock`
    guards `clients` and all their data; `wake`, its condition, wakes the worker. `ended`: why the worker stopped, None
    while it runs.
    """

    def __init__(self, bundle: Bundle, open_executor: Callable[[], Executor], min_prefix: int | None = None) -> None:
        self.bundle = bundle
        self.plan = bundle.plan
        self.longest_prompt = bundle.plan.limits.longest_prompt
        self.lock = threading.Lock()
        self.wake = threading.Condition(self.lock)
        self.clients: set[WorkerClient] = set()
        self.ended: str | None = None
        self._min_prefix = min_prefix
        self._live: dict[int, PrefillJob] = {}
        self._cancelled: list[int] = []
        self._errands: deque[tuple[Callable[[Executor], object], Future[None]]] = deque()
        self._numbers = itertools.count()
        self._opened: Future[tuple[Executor, SideFacts]] = Future()
        self._thread = threading.Thread(target=self._run, args=(open_executor,), name="llmc-prefill", daemon=True)
        self._thread.start()
        self.executor, self.facts = self._opened.result()
        """Only the worker's thread runs the executor; others read its constants."""

    def client(self, bound: int | None = None, owned: bool = False) -> WorkerClient:
        """Create a client. `bound`: see WorkerClient; default: prompts of one step, at least LEAST_BOUND.

        `owned`: closing the client closes the worker.
        """
        if bound is None:
            limits = self.plan.limits
            batch = limits.max_num_seqs if self.executor.capabilities.ragged else max(b.batch for b in self.plan.prompt)
            bound = max(LEAST_BOUND, batch)
        client = WorkerClient(self, bound, owned)
        with self.lock:
            self.clients.add(client)
        return client

    def cancel(self, job: PrefillJob) -> None:
        """Cancel a running prompt; called by its client, which holds the lock."""
        if self._live.pop(job.sequence, None) is not None:
            self._cancelled.append(job.sequence)

    @property
    def compilations(self) -> int:
        """Graphs compiled by its executor while serving."""
        return self.executor.compilations.count

    def leave(self, client: WorkerClient) -> None:
        """Remove a closed client, which holds the lock."""
        self.clients.discard(client)

    def do(self, work: Callable[[Executor], object]) -> None:
        """Run `work` in the worker's thread once no prompt runs, then forget the slots' contents.

        Raises the errors of `work`.
        """
        done: Future[None] = Future()
        with self.lock:
            if self.ended is not None:
                raise DeviceError(self.ended)
            self._errands.append((work, done))
            self.wake.notify()
        done.result()

    def close(self) -> None:
        """End the thread after its current step and close the executor; unfinished prompts fail."""
        with self.lock:
            self._end("the prefill side was closed")
        self._thread.join()
        self.bundle.files.close()

    def _end(self, reason: str) -> None:
        if self.ended is None:
            self.ended = reason
        for client in self.clients:
            client.fail(self.ended)
        for _, done in self._errands:
            done.set_exception(DeviceError(self.ended))
        self._errands.clear()
        self.wake.notify()

    def _run(self, open_executor: Callable[[], Executor]) -> None:
        try:
            executor = open_executor()
        except BaseException as e:  # noqa: BLE001 - raised in the constructor
            self._opened.set_exception(e)
            return
        try:
            scheduler = self._scheduler(executor)
            facts = SideFacts.of(self.bundle, executor)
        except BaseException as e:  # noqa: BLE001 - raised in the constructor
            executor.close()
            self._opened.set_exception(e)
            return
        self._opened.set_result((executor, facts))
        try:
            while self._next(scheduler):
                work = scheduler.next()
                if work is not None:
                    self._step(scheduler, executor, work)
                elif self._errands:
                    self._do(scheduler, executor)
                for client in tuple(self.clients):
                    client.notify()
        except BaseException as e:  # noqa: BLE001 - clients must learn of any error
            _log.exception("the prefill side stopped after an error")
            with self.lock:
                self._end(f"the prefill side stopped after an error ({type(e).__name__}: {e})")
        finally:
            for client in tuple(self.clients):
                client.notify()
            executor.close()

    def _scheduler(self, executor: Executor) -> Scheduler:
        chosen: dict[str, Any] = {} if self._min_prefix is None else {"min_prefix": self._min_prefix}
        can = executor.capabilities
        config = SchedulerConfig(
            max_num_seqs=min(self.plan.limits.max_num_seqs, executor.slots), slots=executor.slots, exact=can.exact,
            ragged=can.ragged, cache_tokens=can.cache_tokens, block_tokens=can.block_tokens,
            prompt_chunk=can.prompt_chunk,
            rewind=executor.bundle.cache_shape.rewind, **chosen,
        )  # fmt: skip
        return open_scheduler(self.plan, config)

    def _next(self, scheduler: Scheduler) -> bool:
        """Wait for work and queue it; false when the thread must end."""
        with self.lock:
            while self.ended is None and not (
                self._live or self._cancelled or self._errands or any(c.startable for c in self.clients)
            ):
                self.wake.wait()
            if self.ended is not None:
                return False
            cancelled, self._cancelled = self._cancelled, []
            started = [] if self._errands else self._started()
        for sequence in cancelled:
            scheduler.cancel(sequence)
        for job in started:
            scheduler.add(job.sequence, job.prompt, budget=1)
        return True

    def _do(self, scheduler: Scheduler, executor: Executor) -> None:
        work, done = self._errands.popleft()
        try:
            work(executor)
        except Exception as e:  # noqa: BLE001 - raised in the calling thread
            done.set_exception(e)
        else:
            done.set_result(None)
        scheduler.reset()

    def _started(self) -> list[PrefillJob]:
        """Start the clients' next prompts, round-robin."""
        started = []
        while ready := [client for client in self.clients if client.startable]:
            for client in ready:
                job = client.start()
                job.sequence = next(self._numbers)
                self._live[job.sequence] = job
                started.append(job)
        return started

    def _step(self, scheduler: Scheduler, executor: Executor, work: ScheduledBatch) -> None:
        """Run one step; an executor error fails only the running prompts."""
        began = time.perf_counter()
        for sequence, cached in work.admitted:
            if (job := self._live.get(sequence)) is not None:
                job.began_s, job.cached = began, cached
        try:
            results = self._compute(scheduler, executor, work)
        except Exception as e:  # noqa: BLE001 - executors raise errors of their own
            _log.warning("a prefill step failed: %s: %s", type(e).__name__, e)
            scheduler.reset()
            with self.lock:
                failed, self._live = self._live, {}
                self._cancelled.clear()
                for job in failed.values():
                    job.client.deliver(PrefillFailed(job.number, f"{type(e).__name__}: {e}"))
            return
        with self.lock:
            for job, result in results:
                if self._live.pop(job.sequence, None) is not None:
                    job.client.deliver(result)

    def _compute(
        self, scheduler: Scheduler, executor: Executor, work: ScheduledBatch
    ) -> list[tuple[PrefillJob, Prefilled]]:
        for copy in work.copies:
            executor.copy_prefix(copy.source, copy.target, copy.length)
        logits = executor.run(step_of(work, executor.capabilities.ragged))
        ended = time.perf_counter()
        results = []
        for at, row in enumerate(work.rows):
            job = self._live.get(row.sequence)
            if np.isnan(logits[at]).any():
                scheduler.fail(row.sequence)  # the sampler reports the NaN
            if row.emits and job is not None:
                results.append((job, _exported(executor, row.slot, job, logits[at].copy(), ended)))
        emitted = {row.sequence for row in work.rows if row.emits}
        scheduler.complete(work, {sequence: [0] for sequence in emitted}, emitted)
        return results


def _exported(
    executor: Executor, slot: int, job: PrefillJob, logits: np.typing.NDArray[np.float32], ended: float
) -> Prefilled:
    """Export a computed prompt from its slot. `ended`: the end of its last step."""
    began = time.perf_counter()
    prefix = executor.export_prefix(slot, len(job.prompt))
    now = time.perf_counter()
    started = ended if job.began_s is None else job.began_s
    cost = KVTransfer(
        len(job.prompt), job.cached, sum(tensor.nbytes for tensor in prefix) + logits.nbytes,
        started - job.arrived_s, ended - started, now - began, 0.0,
    )  # fmt: skip
    return Prefilled(job.number, prefix, logits, cost, now)
