"""How a server warms up: before it is ready, or, of most buckets, between requests; and how far it has come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, get_args

from llmc.errors import UnknownNameError
from llmc.runtime.startup.capturing import CaptureChoice, Capturing
from llmc.runtime.startup.warming import OPENING, Warming
from llmc.server.events import WarmAside
from llmc.server.state import Progress

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.plan import Plan
    from llmc.runtime.executors.base import Executor

How = Literal["all", "open", "aside"]
"""all: run every bucket, and capture graphs; open: run the smallest bucket of each phase, open the other executables
unrun, and capture nothing; aside: run these two, the others between requests, and then capture so too."""

Report = Callable[[Progress], None]

STAGE, GRAPHS = "warm up", "capture graphs"
_log = logging.getLogger("llmc")


@dataclass(frozen=True)
class WarmUp:
    """What is run before requests come; `uses` says how often traffic runs each bucket of a plan: the hottest first.
    `capture` is how the memory of a device that captures graphs is divided."""

    how: How = "all"
    uses: Callable[[Plan], Mapping[Bucket, int]] | None = None
    capture: CaptureChoice = field(default_factory=CaptureChoice)


def how_of(name: str) -> How:
    """The How called `name`; raises UnknownNameError."""
    for known in get_args(How):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise UnknownNameError("warm-up", name, get_args(How))


class Countdown:
    """Progress through parts of a stage; what is left is told by their `costs`, in any unit, and the time so far."""

    def __init__(self, stage: str, costs: Sequence[float], tell: Report) -> None:
        self._stage, self._report = stage, tell
        self._costs = [0.0, *accumulate(costs)]
        self._began = time.monotonic()
        tell(Progress(stage, 0, len(costs)))

    def __call__(self, done: int) -> None:
        """`done` parts are done, at least one."""
        each = (time.monotonic() - self._began) / self._costs[done]
        left = each * (self._costs[-1] - self._costs[done])
        self._report(Progress(self._stage, done, len(self._costs) - 1, left))


@dataclass(frozen=True)
class Aside:
    """What is run between requests: the steps of `warming`, then graphs of these and of the buckets that `ran` before
    are captured, where the device does."""

    warming: Warming
    ran: tuple[Bucket, ...]
    capturing: Capturing | None


@dataclass(frozen=True)
class Warm:
    """How many buckets ran before the server was ready, and what is left to run between requests."""

    buckets: int
    aside: Aside | None = None


def warm(executor: Executor, plan: Plan, warm_up: WarmUp, tell: Report) -> Warm:
    """Run what `warm_up` asks for before requests come, in the memory that is divided first.

    Opens whatever executable the bundle has besides, unless buckets are left to run aside. Raises what the executor
    raises: a graph that cannot run here is found now. Buckets that cannot be captured run as they are.
    """
    capturing = Capturing.of(executor, plan, warm_up.capture)
    if capturing is not None:
        tell(Progress("profile run"))
        capturing.divide()
    uses = None if warm_up.uses is None else warm_up.uses(plan)
    smallest = warm_up.how != "all" and not executor.capabilities.exact
    warming = Warming(executor, plan, uses=uses, smallest=smallest)
    progress = Countdown(STAGE, [one.cost for one in warming.steps], tell)
    for done, warmed in enumerate(warming.run(), 1):
        if warmed.error is not None:
            _log.error("%s failed to warm up", warmed.bucket)
            raise warmed.error
        progress(done)
    if warm_up.how == "aside" and smallest:
        ran = tuple(one.bucket for one in warming.steps)
        return Warm(len(ran), Aside(Warming(executor, plan, uses=uses, without=ran), ran, capturing))
    if warm_up.how == "open":
        tell(Progress("open executables"))
    elif capturing is not None:
        for _ in _captured(capturing, [one.bucket for one in warming.steps], tell):
            pass
    executor.open_all()
    executor.compilations.ready()
    return Warm(len(warming.steps))


def _captured(capturing: Capturing, buckets: Sequence[Bucket], tell: Report) -> Iterator[Bucket]:
    """Captures a graph for each item that is asked for, and tells how far it has come; not all may fit."""
    progress = Countdown(GRAPHS, [bucket.tokens + OPENING for bucket in buckets], tell)
    for done, bucket in enumerate(capturing.run(buckets), 1):
        progress(done)
        yield bucket


def aside(executor: Executor, left: Aside, tell: Report, over: Callable[[WarmAside], None]) -> Iterator[None]:
    """Runs or captures a bucket for each item that is asked for, between requests; `over` hears of the end.

    A bucket that fails is named in the log, and the others are run: what serves goes on serving.
    """
    warming = left.warming
    progress = Countdown(STAGE, [one.cost for one in warming.steps], tell)
    failed: list[str] = []
    ran = list(left.ran)
    seconds = 0.0
    for done, warmed in enumerate(warming.run(), 1):
        seconds += warmed.seconds
        if warmed.error is not None:
            failed.append(str(warmed.bucket))
            _log.error("%s failed to warm up: %s: %s", warmed.bucket, type(warmed.error).__name__, warmed.error)
        else:
            ran.append(warmed.bucket)
        progress(done)
        yield
    if left.capturing is not None:
        yield from _aside_captured(left.capturing, ran, tell)
    try:
        executor.open_all()  # all are open, but for those that are no bucket's, and those that failed
    except Exception as e:  # noqa: BLE001 - as of a bucket
        _log.error("%s: %s", type(e).__name__, e)
    executor.compilations.ready()
    over(WarmAside(len(warming.steps) - len(failed), tuple(failed), seconds, executor.compilations.count))


def _aside_captured(capturing: Capturing, buckets: Sequence[Bucket], tell: Report) -> Iterator[None]:
    """Captures between requests; a device that fails at it is named in the log."""
    try:
        for _ in _captured(capturing, buckets, tell):
            yield
    except Exception as e:  # noqa: BLE001 - as of a bucket
        _log.error("capturing graphs ended: %s: %s", type(e).__name__, e)
