"""The contract with a prefill side, which computes prompts on another executor and hands their keys and values over,
and the sequences that wait for it.

A prompt's life: submitted → computed there → taken here → put into a slot by the scheduler's next step, which samples
its first token from the logits that came along. The order is that of vLLM's KV connectors (vllm-project/vllm,
docs/features/disagg_prefill.md), with two differences: the last prompt token is not computed again here, since its
logits come along, and nothing is allocated here before a prompt is computed.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from array import array

    from llmc.runtime.engine.scheduling.base import ScheduledBatch
    from llmc.runtime.executors.base import Executor

TRIES = 2
"""How often the prefill side is asked for a prompt."""


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """What handing a prompt over cost. `tokens` of it, of which the prefill side had `cached_tokens` already; `bytes`
    of keys, values and logits as they were moved.

    Seconds, in their order: `queue_s` until the prefill side began, `prefill_s` computing, `export_s` copying out of
    its cache, `transfer_s` receiving, `wait_s` for the transport and for a slot here, `import_s` copying into it.
    """

    tokens: int
    cached_tokens: int
    bytes: int
    queue_s: float
    prefill_s: float
    export_s: float
    transfer_s: float
    wait_s: float = 0.0
    import_s: float = 0.0

    @property
    def moving_s(self) -> float:
        """Seconds of moving: export, transfer and import."""
        return self.export_s + self.transfer_s + self.import_s

    @property
    def gb_per_s(self) -> float:
        """10⁹ bytes a second of moving."""
        return self.bytes / self.moving_s / 1e9 if self.moving_s else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """Prompt `number`, computed: `prefix` as `Executor.export_prefix` gives it, `logits` [V] after its last token.
    `arrived_s` is time.perf_counter() when it could be taken."""

    number: int
    prefix: list[NDArray[np.float32]]
    logits: NDArray[np.float32]
    cost: KVTransfer
    arrived_s: float


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """Prompt `number` could not be computed. `passing`: for a reason that another try may not meet."""

    number: int
    reason: str
    passing: bool = True


class Prefiller(ABC):
    """Computes prompts elsewhere. `submit`, `cancel` and `take` are called by one thread, the engine's.

    It keeps at most a fixed number of computed prompts, and computes no more before some are taken. Results are in the
    order in which they came; `changed` belongs to the lock that guards them.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._came: deque[Prefilled | PrefillFailed] = deque()
        self._call: Callable[[], None] | None = None
        self._closed = False

    @property
    @abstractmethod
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that it takes."""

    @property
    @abstractmethod
    def bound(self) -> int:
        """Computed prompts that may wait on either side."""

    @abstractmethod
    def submit(self, number: int, prompt: Sequence[int], priority: int = 0) -> None:
        """Ask for a prompt, under a new number; `take` gives a result for each. Lower `priority` goes first."""

    @abstractmethod
    def cancel(self, number: int) -> None:
        """Forget a prompt: nothing of it is taken from now on, and what it holds is freed. Unknown ones are fine."""

    def take(self, most: int) -> list[Prefilled | PrefillFailed]:
        """What came, at most `most` computed prompts; failures count for nothing."""
        taken: list[Prefilled | PrefillFailed] = []
        with self._changed:
            while self._came and (most or isinstance(self._came[0], PrefillFailed)):
                taken.append(self._came.popleft())
                most -= isinstance(taken[-1], Prefilled)
            if taken:
                self._freed_room()
        return taken

    @property
    def has_news(self) -> bool:
        """Whether `take` would give something. Takes no lock, so that whoever is told of news may ask under one of his
        own."""
        return bool(self._came)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until there is news; whether there is."""
        with self._changed:
            self._changed.wait_for(lambda: self._came or self._closed, timeout_s)
            return bool(self._came)

    def on_news(self, call: Callable[[], None]) -> None:
        """Call `call` from now on whenever there is news, in any thread."""
        self._call = call

    def notify(self) -> None:
        """Call whoever wants to know of news, if there is any; not under the lock."""
        if self._call is not None and self._came:
            self._call()

    @property
    @abstractmethod
    def compilations(self) -> int:
        """Graphs that its executor compiled while serving; 0 where another process has it, and tells itself."""

    @abstractmethod
    def prepare(self, work: Callable[[Executor], object]) -> None:
        """Do `work`, such as a warm-up, on the executor in this process, and forget what its slots held before.

        Nothing where another process has the executor, and makes it ready itself. Raises what `work` raises.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; what was submitted is forgotten."""

    def _freed_room(self) -> None:
        """Some were taken or forgotten; called under the lock."""
        self._changed.notify_all()

    def _forget(self, number: int) -> None:
        """Drop what came of a prompt that nobody wants any more; called under the lock."""
        self._came = deque(one for one in self._came if one.number != number)
        self._freed_room()


@dataclass(slots=True)
class Awaited:
    """A prompt that is computed once for `sequences`, each with its budget of tokens; `tries` so far."""

    number: int
    prompt: Sequence[int] | array[int]
    priority: int
    sequences: dict[int, int] = field(default_factory=dict)
    tries: int = 1


class AwaitedPrompts:
    """Prompts at `prefiller`, and those that came and are not in a slot yet. A group's prompt has its number."""

    def __init__(self, prefiller: Prefiller) -> None:
        self.prefiller = prefiller
        self._requested: dict[int, Awaited] = {}
        self._numbers: dict[int, int] = {}
        """Of each sequence that waits."""
        self._came: dict[int, Prefilled] = {}
        """By sequence; those of a group share one."""

    def __len__(self) -> int:
        return len(self._numbers)

    def ask(
        self, sequence: int, prompt: Sequence[int], *, priority: int, group: int | None, budget: int
    ) -> None:  # fmt: skip
        """Have the prompt of a sequence computed, unless that of its group is already."""
        number = sequence if group is None else group
        awaited = self._requested.get(number)
        if awaited is None:
            awaited = self._requested[number] = Awaited(number, prompt, priority)
            self.prefiller.submit(number, prompt, priority)
        awaited.sequences[sequence] = budget
        self._numbers[sequence] = number

    def forget(self, sequence: int) -> None:
        """A sequence ended, wherever it is."""
        self._came.pop(sequence, None)
        number = self._numbers.pop(sequence, None)
        if number is None:
            return
        awaited = self._requested[number]
        del awaited.sequences[sequence]
        if not awaited.sequences:
            del self._requested[number]
            self.prefiller.cancel(number)

    def clear(self) -> None:
        """Every sequence ended."""
        for number in self._requested:
            self.prefiller.cancel(number)
        self._requested.clear()
        self._numbers.clear()
        self._came.clear()

    def news(self) -> Iterator[tuple[Awaited, PrefillFailed | None]]:
        """Prompts that came, as far as places are free for them, and those that will not come, with the reason."""
        waiting = len({one.number for one in self._came.values()})
        for one in self.prefiller.take(max(0, self.prefiller.bound - waiting)):
            awaited = self._requested.get(one.number)
            if awaited is None:
                continue
            if isinstance(one, PrefillFailed) and one.passing and awaited.tries < TRIES:
                awaited.tries += 1
                self.prefiller.submit(awaited.number, awaited.prompt, awaited.priority)
                continue
            del self._requested[one.number]
            for sequence in awaited.sequences:
                del self._numbers[sequence]
                if isinstance(one, Prefilled):
                    self._came[sequence] = one
            yield awaited, one if isinstance(one, PrefillFailed) else None

    def put(self, executor: Executor, work: ScheduledBatch) -> tuple[NDArray[np.float32], dict[int, KVTransfer]]:
        """Put the rows of a step that hands over into their slots; the logits of each, [B, V], and costs by sequence.

        Of a group one is put, and copied to the others.
        """
        placed: dict[int, int] = {}
        logits: list[NDArray[np.float32]] = []
        costs: dict[int, KVTransfer] = {}
        for row in work.rows:
            one = self._came.pop(row.sequence)
            logits.append(one.logits)
            began = time.perf_counter()
            if one.number in placed:
                executor.copy_prefix(placed[one.number], row.slot, len(row.tokens))
            else:
                executor.import_prefix(row.slot, one.prefix)
                placed[one.number] = row.slot
            ended = time.perf_counter()
            costs[row.sequence] = replace(
                one.cost, wait_s=one.cost.wait_s + began - one.arrived_s, import_s=ended - began
            )
        return np.stack(logits), costs
