"""One client's prompts at a prefill worker: what waits to be computed, what is, and what waits to be taken."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol

from llmc.runtime.engine.handover import Prefilled, PrefillFailed
from llmc.runtime.hybrid.arrivals import Arrivals

if TYPE_CHECKING:
    from llmc.runtime.executors.base import Executor

OVERTAKE = 64
"""Later arrivals that one step of priority is worth, as in SchedulerConfig."""


@dataclass(slots=True, eq=False)
class Job:
    """Prompt `number` of `client`; `sequence` is its number in the worker's scheduler, −1 while it waits for that.
    `arrived_s` and `began_s`, its first step, in time.perf_counter() seconds; `cached` tokens came from a prefix."""

    client: WorkerClient
    number: int
    prompt: array[int]
    arrived_s: float
    sequence: int = -1
    began_s: float | None = None
    cached: int = 0


class Worker(Protocol):
    """What a client sees of its worker (worker.py). `lock` guards all clients; `wake` belongs to it, and tells the
    worker of news. `ended` says why nothing is computed any more."""

    lock: threading.Lock
    wake: threading.Condition
    ended: str | None
    longest_prompt: int

    @property
    def compilations(self) -> int:
        """Graphs that its executor compiled while serving."""

    def cancel(self, job: Job) -> None:
        """Compute a prompt that runs no further; called under the lock."""

    def leave(self, client: WorkerClient) -> None:
        """The client is closed; called under the lock."""

    def do(self, work: Callable[[Executor], object]) -> None:
        """Do something with its executor."""

    def close(self) -> None:
        """End it."""


class WorkerClient(Arrivals):
    """At most `bound` of a client's prompts are in computation or wait to be taken. So a client that takes nothing
    holds up nobody else, and memory stays bounded.

    `submit`, `cancel` and `take` may be called by any thread. `running`, `start` and `deliver` are the worker's, which
    calls the last two while it holds its lock.
    """

    def __init__(self, worker: Worker, bound: int, owns: bool = False) -> None:
        super().__init__(threading.Condition(worker.lock))
        self._worker = worker
        self._bound = bound
        self._owns = owns
        self._jobs: dict[int, Job] = {}
        """Those that wait or run."""
        self._waiting: list[tuple[int, int, Job]] = []
        self._arrivals = 0
        self.running = 0

    @property
    def longest_prompt(self) -> int:
        """The worker's."""
        return self._worker.longest_prompt

    @property
    def bound(self) -> int:
        """As it was opened."""
        return self._bound

    def submit(self, number: int, prompt: Sequence[int], priority: int = 0) -> None:
        """Queue it; see Prefiller. It fails where the worker has ended."""
        job = Job(self, number, array("q", prompt), time.perf_counter())
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
        """Forget it, wherever it is; see Prefiller."""
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
        """See Prefiller."""
        return self._worker.compilations

    def prepare(self, work: Callable[[Executor], object]) -> None:
        """See Prefiller."""
        self._worker.do(work)

    def close(self) -> None:
        """Forget all, and leave the worker to others; end it where it is this client's own."""
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
        """Whether a prompt waits, and there is room for what it gives."""
        return bool(self._waiting) and self.running + len(self._came) < self._bound

    def start(self) -> Job:
        """Its next prompt, which runs from now on."""
        self.running += 1
        return heappop(self._waiting)[2]

    def deliver(self, result: Prefilled | PrefillFailed) -> None:
        """A prompt that ran has this result."""
        if self._jobs.pop(result.number, None) is not None:
            self.running -= 1
            self._came.append(result)
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """None of its prompts will be computed."""
        self._came.extend(PrefillFailed(number, reason, passing=False) for number in self._jobs)
        self._jobs.clear()
        self._waiting.clear()
        self._changed.notify_all()

    def _made_room(self) -> None:
        self._worker.wake.notify()
