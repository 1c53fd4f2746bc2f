"""Running every graph before requests need it, so that no request is the first to open, map or page one in.

The command `llmc warmup` and the server run the same steps, through the function that serves (`Executor.run`), in the
order of buckets/capture/order.py. A line in the guide's form is logged for each at INFO, before it runs.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.buckets.bucket import Bucket
from llmc.buckets.capture.log import Lines
from llmc.buckets.capture.order import warm_up_order
from llmc.runtime.host import available_memory
from llmc.runtime.step import Step, exact, pad

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan
    from llmc.runtime.executors.base import Executor

_log = logging.getLogger("llmc")

SHORT = 32
"""Tokens of the prompt that touches everything once, where any length will do."""
OPENING = 128
"""The rough cost of opening an executable and reading its weights, in tokens of a prompt that takes as long."""


@dataclass(frozen=True, slots=True)
class WarmUpStep:
    """A step with a single live row in slot 0, at the shape of `bucket`: the `number`th of `of` of its phase."""

    bucket: Bucket
    step: Step
    number: int
    of: int

    @property
    def cost(self) -> int:
        """How long its first run should take, in tokens."""
        return self.step.token_ids.size + OPENING


@dataclass(frozen=True, slots=True)
class Warmed:
    """A bucket that was run: the seconds it took, or `error`, which the executor raised."""

    bucket: Bucket
    seconds: float
    error: Exception | None = None

    @property
    def name(self) -> str:
        """The bucket's."""
        return str(self.bucket)


class Warming:
    """The steps of one warm-up, over an executor of `plan`: `run` opens each graph, `replay` runs it again.

    `uses` is how often traffic runs each bucket: the hottest come first then, else the largest. `smallest`: the
    smallest bucket of each phase alone; `without`: all but these. Where any shape runs, a prompt and a decode step are
    all there is.

    A bucket whose run raises is told with its error, and those behind it are run all the same. Slots hold what the
    steps left there: nothing of what they held before may be used afterwards.
    """

    def __init__(
        self, executor: Executor, plan: Plan, *, uses: Mapping[Bucket, int] | None = None, smallest: bool = False,
        without: Collection[Bucket] = (),
    ) -> None:  # fmt: skip
        steps = _steps(executor, plan, uses, smallest)
        self.steps = _numbered([one for one in steps if one[0] not in without])
        self._executor = executor
        self._device = executor.capabilities.graph_device
        self._lines = Lines.of(plan.buckets, plan.limits.block_size)
        self._warm: list[WarmUpStep] = []

    @property
    def buckets(self) -> list[Bucket]:
        """Those that are run, in order."""
        return [one.bucket for one in self.steps]

    def free_memory(self) -> int | None:
        """Bytes free on a device that captures graphs, on any other in the host; None where the host does not say."""
        return available_memory() if self._device is None else self._device.free_memory()

    def run(self) -> Iterator[Warmed]:
        """Run every step for the first time, one for each that is asked for, and log its line."""
        for one in self.steps:
            if _log.isEnabledFor(logging.INFO):
                _log.info("%s", self._lines.run(one.bucket, one.number, one.of, self.free_memory()))
            warmed = self._run(one)
            if warmed.error is None:
                self._warm.append(one)
            yield warmed

    def replay(self) -> Iterator[Warmed]:
        """Run those again that ran."""
        for one in self._warm:
            yield self._run(one)

    def _run(self, one: WarmUpStep) -> Warmed:
        began = time.perf_counter()
        try:
            self._executor.run(one.step)
        except Exception as e:  # noqa: BLE001 - engines raise errors of their own; whoever warms up names the bucket
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
