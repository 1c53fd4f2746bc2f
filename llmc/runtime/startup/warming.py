"""Run every graph before requests need it, so that no request waits for one to be opened, mapped or paged in.

`llmc warmup` and the server run the same steps through the serving function (`Executor.run`), in the order of
buckets/capture/order.py. Each is logged at INFO before it runs, in the format of vLLM's Gaudi guide.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.buckets.bucket import Bucket
from llmc.buckets.capture.log import CaptureLog
from llmc.buckets.capture.order import warm_up_order
from llmc.runtime.host import available_memory
from llmc.runtime.step import Step, exact, pad

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan
    from llmc.runtime.executors.base import Executor

_log = logging.getLogger("llmc")

SHORT = 32
"""Prompt tokens of the one step that touches everything, if any length runs."""
OPENING = 128
"""Rough cost of opening an executable and reading its weights, in prompt tokens of equal duration."""


@dataclass(frozen=True, slots=True)
class WarmUpStep:
    """A step with one live row in slot 0, at the shape of `bucket`: number `number` of `of` in its phase."""

    bucket: Bucket
    step: Step
    number: int
    of: int

    @property
    def cost(self) -> int:
        """Expected duration of its first run, in tokens."""
        return self.step.token_ids.size + OPENING


@dataclass(frozen=True, slots=True)
class Warmed:
    """A bucket that was run: its seconds, or the executor's error."""

    bucket: Bucket
    seconds: float
    error: Exception | None = None

    @property
    def name(self) -> str:
        """The bucket's name."""
        return str(self.bucket)


class Warming:
    """The steps of one warm-up, over an executor of `plan`: `run` opens each graph, `replay` runs it again.

    `uses`: how often traffic runs each bucket, to run the hottest first; without it, the largest come first.
    `smallest`: only the smallest bucket of each phase; `without`: all others. If any shape runs, one prefill and one
    decode step are all.

    A failing bucket is reported with its error, and the next ones still run. Afterwards the slots hold arbitrary
    content, so nothing cached before may be used.
    """

    def __init__(
        self, executor: Executor, plan: Plan, *, uses: Mapping[Bucket, int] | None = None, smallest: bool = False,
        without: Collection[Bucket] = (),
    ) -> None:  # fmt: skip
        steps = _steps(executor, plan, uses, smallest)
        self.steps = _numbered([one for one in steps if one[0] not in without])
        self._executor = executor
        self._device = executor.capabilities.graph_device
        self._lines = CaptureLog.of(plan.buckets, plan.limits.block_size)
        self._warm: list[WarmUpStep] = []

    @property
    def buckets(self) -> list[Bucket]:
        """Buckets to run, in order."""
        return [one.bucket for one in self.steps]

    def free_memory(self) -> int | None:
        """Free bytes of a device that captures graphs, otherwise of the host; None if unknown."""
        return available_memory() if self._device is None else self._device.free_memory()

    def run(self) -> Iterator[Warmed]:
        """Run the next step for the first time and log its line, for each item requested."""
        for one in self.steps:
            if _log.isEnabledFor(logging.INFO):
                _log.info("%s", self._lines.run(one.bucket, one.number, one.of, self.free_memory()))
            warmed = self._run(one)
            if warmed.error is None:
                self._warm.append(one)
            yield warmed

    def replay(self) -> Iterator[Warmed]:
        """Run each step again that succeeded."""
        for one in self._warm:
            yield self._run(one)

    def _run(self, one: WarmUpStep) -> Warmed:
        began = time.perf_counter()
        try:
            self._executor.run(one.step)
        except Exception as e:  # noqa: BLE001 - engines raise errors of their own; the caller names the bucket
            return Warmed(one.bucket, time.perf_counter() - began, e)
        return Warmed(one.bucket, time.perf_counter() - began)


def _steps(
    executor: Executor, plan: Plan, uses: Mapping[Bucket, int] | None, smallest: bool
) -> list[tuple[Bucket, Step]]:
    if executor.capabilities.exact:
        tokens = min(SHORT, plan.limits.longest_prompt, max(b.query for b in plan.prompt))
        return [
            (Bucket("prompt", 1, tokens, 0), exact("prompt", [0], [[0] * tokens], [0])),
            (Bucket("decode", 1, 1, tokens), exact("decode", [0], [[0]], [tokens])),
        ]
    if smallest:
        buckets = [min(phase, key=lambda b: (b.tokens, b.context)) for phase in (plan.prompt, plan.decode)]
    else:
        buckets = warm_up_order(plan.buckets, uses)
    return [(bucket, pad(bucket, [0], [[0] * bucket.query], [0])) for bucket in buckets]


def _numbered(steps: list[tuple[Bucket, Step]]) -> list[WarmUpStep]:
    totals, so_far = Counter(bucket.phase for bucket, _ in steps), Counter[str]()
    found = []
    for bucket, step in steps:
        so_far[bucket.phase] += 1
        found.append(WarmUpStep(bucket, step, so_far[bucket.phase], totals[bucket.phase]))
    return found
