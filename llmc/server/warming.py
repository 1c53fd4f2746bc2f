"""Running every graph once before requests come, so that no request is the first to open, map or page one in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, get_args

from llmc.buckets.warmup.order import warm_up_order
from llmc.errors import UnknownNameError
from llmc.runtime.step import Step, exact, pad
from llmc.server.state import Progress

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan
    from llmc.runtime.executors.base import Executor

WarmUp = Literal["all", "open"]
"""all: run every bucket; open: run one prompt and one decode step, and open the other executables unrun."""

Tell = Callable[[Progress], None]

SHORT = 32
"""Tokens of the prompt that touches everything once, where any length will do."""
OPENING = 128
"""The rough cost of opening an executable and reading its weights, in tokens of a prompt that takes as long."""


def warm_up_of(name: str) -> WarmUp:
    """The WarmUp called `name`; raises UnknownNameError."""
    for known in get_args(WarmUp):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise UnknownNameError("warm-up", name, get_args(WarmUp))


class Countdown:
    """Progress through parts of a stage; what is left is told by their `costs`, in any unit, and the time so far."""

    def __init__(self, stage: str, costs: Sequence[float], tell: Tell) -> None:
        self._stage, self._tell = stage, tell
        self._costs = [0.0, *accumulate(costs)]
        self._began = time.monotonic()
        tell(Progress(stage, 0, len(costs)))

    def __call__(self, done: int) -> None:
        """`done` parts are done, at least one."""
        each = (time.monotonic() - self._began) / self._costs[done]
        left = each * (self._costs[-1] - self._costs[done])
        self._tell(Progress(self._stage, done, len(self._costs) - 1, left))


def warm(executor: Executor, plan: Plan, how: WarmUp, tell: Tell) -> int:
    """Run each step of `warm_up_steps` through `executor.run`, as requests will be; returns how many.

    Opens whatever executable the bundle has besides. Raises what the executor raises: a graph that cannot run here is
    found now.
    """
    steps = warm_up_steps(executor, plan, how)
    progress = Countdown("warm up", [s.token_ids.size + OPENING for s in steps], tell)
    for done, step in enumerate(steps, 1):
        executor.run(step)
        progress(done)
    if how == "open":
        tell(Progress("open executables"))
    executor.open_all()
    executor.ready()
    return len(steps)


def warm_up_steps(executor: Executor, plan: Plan, how: WarmUp) -> list[Step]:
    """One step for each bucket, the largest first, with a single live row in slot 0.

    One prompt and one decode step are all there is where any shape runs; "open" takes the smallest bucket of each.
    """
    if executor.exact:
        tokens = min(SHORT, plan.limits.longest_prompt, max(b.query for b in plan.prompt))
        return [exact("prompt", [0], [[0] * tokens], [0]), exact("decode", [0], [[0]], [tokens])]
    buckets = plan.buckets
    if how == "open":
        buckets = tuple(min(phase, key=lambda b: (b.tokens, b.context)) for phase in (plan.prompt, plan.decode))
    return [pad(bucket, [0], [[0] * bucket.query], [0]) for bucket in warm_up_order(buckets)]
