"""How a server warms up: which steps, and how far it has come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, get_args

from llmc.errors import UnknownNameError
from llmc.runtime.startup.warming import Warming
from llmc.server.state import Progress

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.plan import Plan
    from llmc.runtime.executors.base import Executor

How = Literal["all", "open"]
"""all: run every bucket; open: run the smallest bucket of each phase, and open the other executables unrun."""

Tell = Callable[[Progress], None]

STAGE = "warm up"
_log = logging.getLogger("llmc")


@dataclass(frozen=True)
class WarmUp:
    """What is run before requests come; `uses` says how often traffic runs each bucket of a plan: the hottest first."""

    how: How = "all"
    uses: Callable[[Plan], Mapping[Bucket, int]] | None = None


def how_of(name: str) -> How:
    """The How called `name`; raises UnknownNameError."""
    for known in get_args(How):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise UnknownNameError("warm-up", name, get_args(How))


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


def warm(executor: Executor, plan: Plan, warm_up: WarmUp, tell: Tell) -> int:
    """Run what `warm_up` asks for before requests come; returns how many buckets.

    Opens whatever executable the bundle has besides. Raises what the executor raises: a graph that cannot run here is
    found now.
    """
    uses = None if warm_up.uses is None else warm_up.uses(plan)
    warming = Warming(executor, plan, uses=uses, smallest=warm_up.how == "open")
    progress = Countdown(STAGE, [one.cost for one in warming.steps], tell)
    for done, warmed in enumerate(warming.run(), 1):
        if warmed.error is not None:
            _log.error("%s failed to warm up", warmed.bucket)
            raise warmed.error
        progress(done)
    if warm_up.how == "open":
        tell(Progress("open executables"))
    executor.open_all()
    executor.ready()
    return len(warming.steps)
