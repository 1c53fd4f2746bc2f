"""The contract with a prefill side, another executor that transfers prompts' KV, and the sequences waiting for it.

A prompt is submitted, computed there, and taken here. The scheduler's next step puts it into a slot and samples its
first token from the transferred logits. The order is that of vLLM's KV connectors (vllm-project/vllm,
docs/features/disagg_prefill.md), with two differences: the last prompt token is not recomputed here, since its logits
are transferred, and nothing is allocated here before a prompt is computed.
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
"""The number of attempts to have a prompt computed by the prefill side."""


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """The cost of one KV transfer of `tokens` tokens, of which the prefill side had `cached_tokens` cached.

    `bytes` counts keys, values and logits as transferred. Seconds, in order: `queue_s` until the prefill side began,
    `prefill_s` computing, `export_s` copying out of its cache, `transfer_s` receiving, `wait_s` for the transport and
    for a slot here, `import_s` copying into it.
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
        """Seconds of moving data: export, transfer and import."""
        return self.export_s + self.transfer_s + self.import_s

    @property
    def gb_per_s(self) -> float:
        """Throughput of moving data, in 10⁹ bytes per second."""
        return self.bytes / self.moving_s / 1e9 if self.moving_s else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """The computed prompt `number`: `prefix` from `Executor.export_prefix`, `logits` [V] after its last token.

    `arrived_s` is the time.perf_counter() when it became available.
    """

    number: int
    prefix: list[NDArray[np.float32]]
    logits: NDArray[np.float32]
    cost: KVTransfer
    arrived_s: float


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """Prompt `number` could not be computed. `passing`: a retry may succeed."""

    number: int
    reason: str
    passing: bool = True


class Prefiller(ABC):
    """Computes prompts elsewhere. Only the engine's thread calls `submit`, `cancel` and `take`.

    It keeps a limited number of computed prompts and pauses until some are taken. Results are ordered by arrival;
    `changed` belongs to the lock that guards them.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._came: deque[Prefilled | PrefillFailed] = deque()
        self._call: Callable[[], None] | None = None
        self._closed = False

    @property
    @abstractmethod
    def longest_prompt(self) -> int:
        """The longest prompt that it accepts, in tokens."""

    @property
    @abstractmethod
    def bound(self) -> int:
        """The largest number of computed prompts that may wait on either side."""

    @abstractmethod
    def submit(self, number: int, prompt: Sequence[int], priority: int = 0) -> None:
        """Request a prompt under a new number; `take` returns one result for each. Lower `priority` goes first."""

    @abstractmethod
    def cancel(self, number: int) -> None:
        """Drop a prompt and its result. Unknown numbers are ignored."""

    def take(self, most: int) -> list[Prefilled | PrefillFailed]:
        """Return the results so far, with at most `most` computed prompts. Failures do not count."""
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
        """Whether `take` would return something. Takes no lock, so callers may hold their own."""
        return bool(self._came)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for results; returns whether there are any."""
        with self._changed:
            self._changed.wait_for(lambda: self._came or self._closed, timeout_s)
            return bool(self._came)

    def on_news(self, call: Callable[[], None]) -> None:
        """Call `call` whenever there are results, from any thread."""
        self._call = call

    def notify(self) -> None:
        """Call the `on_news` callback if there are results. Must not be called under the lock."""
        if self._call is not None and self._came:
            self._call()

    @property
    @abstractmethod
    def compilations(self) -> int:
        """Graphs that its executor compiled while serving; 0 if another process runs it and reports them itself."""

    @abstractmethod
    def prepare(self, work: Callable[[Executor], object]) -> None:
        """Run `work`, such as a warm-up, on the executor in this process, then forget the slots' contents.

        Does nothing if another process has the executor. Raises what `work` raises.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything and drop all submitted prompts."""

    def _freed_room(self) -> None:
        """Called under the lock after results were taken or dropped."""
        self._changed.notify_all()

    def _forget(self, number: int) -> None:
        """Drop a cancelled prompt's result; called under the lock."""
        self._came = deque(one for one in self._came if one.number != number)
        self._freed_room()


@dataclass(slots=True)
class Awaited:
    """A prompt computed once for `sequences`, each with its token budget; `tries` counts the attempts so far."""

    number: int
    prompt: Sequence[int] | array[int]
    priority: int
    sequences: dict[int, int] = field(default_factory=dict)
    tries: int = 1


class AwaitedPrompts:
    """Prompts at `prefiller`, and computed prompts not in a slot yet. A group's prompt uses the group's number."""

    def __init__(self, prefiller: Prefiller) -> None:
        self.prefiller = prefiller
        self._requested: dict[int, Awaited] = {}
        self._numbers: dict[int, int] = {}
        """By waiting sequence."""
        self._came: dict[int, Prefilled] = {}
        """By sequence; those of a group share one."""

    def __len__(self) -> int:
        return len(self._numbers)

    def ask(
        self, sequence: int, prompt: Sequence[int], *, priority: int, group: int | None, budget: int
    ) -> None:  # fmt: skip
        """Request a sequence's prompt, unless its group's prompt is already requested."""
        number = sequence if group is None else group
        awaited = self._requested.get(number)
        if awaited is None:
            awaited = self._requested[number] = Awaited(number, prompt, priority)
            self.prefiller.submit(number, prompt, priority)
        awaited.sequences[sequence] = budget
        self._numbers[sequence] = number

    def forget(self, sequence: int) -> None:
        """Drop a sequence that ended, in whatever state it is."""
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
        """Drop every sequence."""
        for number in self._requested:
            self.prefiller.cancel(number)
        self._requested.clear()
        self._numbers.clear()
        self._came.clear()

    def news(self) -> Iterator[tuple[Awaited, PrefillFailed | None]]:
        """Yield computed prompts, as far as there is room for them, and failed ones with the reason."""
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
        """Import the rows of a KV-transfer step into slots; returns each row's logits [B, V], and costs by sequence.

        Each group's prompt is imported once and copied to its other sequences.
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
