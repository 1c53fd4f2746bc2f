"""The server's warm-up, before it is ready or, for most buckets, between requests; and its progress."""

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
"""How much to warm up before the server is ready.

- all: run every bucket, and capture graphs.
- open: run the smallest bucket of each phase, open the other executables, and capture nothing.
- aside: run the smallest buckets, then between requests the others and the captures.
"""

OnProgress = Callable[[Progress], None]

STAGE, GRAPHS = "warm up", "capture graphs"
_log = logging.getLogger("llmc")


@dataclass(frozen=True)
class WarmUp:
    """What to warm up before requests arrive.

    `uses`: how often traffic runs each bucket of a plan, to run the hottest first. `capture`: how a device that
    captures graphs divides its memory.
    """

    how: How = "all"
    uses: Callable[[Plan], Mapping[Bucket, int]] | None = None
    capture: CaptureChoice = field(default_factory=CaptureChoice)


def how_of(name: str) -> How:
    """Return the How called `name`; raises UnknownNameError."""
    for known in get_args(How):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise UnknownNameError("warm-up", name, get_args(How))


class Countdown:
    """Progress through the parts of a stage; estimates the time left from their `costs`, in any unit."""

    def __init__(self, stage: str, costs: Sequence[float], on_progress: OnProgress) -> None:
        self._stage, self._report = stage, on_progress
        self._costs = [0.0, *accumulate(costs)]
        self._began = time.monotonic()
        on_progress(Progress(stage, 0, len(costs)))

    def __call__(self, done: int) -> None:
        """Report that `done` parts, at least one, are done."""
        each = (time.monotonic() - self._began) / self._costs[done]
        left = each * (self._costs[-1] - self._costs[done])
        self._report(Progress(self._stage, done, len(self._costs) - 1, left))


@dataclass(frozen=True)
class Aside:
    """Work between requests: the steps of `warming`, then captures of their buckets and of those that `ran` before."""

    warming: Warming
    ran: tuple[Bucket, ...]
    capturing: Capturing | None


@dataclass(frozen=True)
class Warm:
    """The number of buckets that ran before the server was ready, and the work left for between requests."""

    buckets: int
    aside: Aside | None = None


def warm(executor: Executor, plan: Plan, warm_up: WarmUp, on_progress: OnProgress) -> Warm:
    """Run the part of `warm_up` that comes before requests, after dividing the device's memory.

    Opens all other executables too, unless buckets are left to run between requests. Raises errors of the executor, so
    a graph that cannot run here is found now. Buckets that cannot be captured run without a graph.
    """
    capturing = Capturing.of(executor, plan, warm_up.capture)
    if capturing is not None:
        on_progress(Progress("profile run"))
        capturing.divide()
    uses = None if warm_up.uses is None else warm_up.uses(plan)
    smallest = warm_up.how != "all" and not executor.capabilities.exact
    warming = Warming(executor, plan, uses=uses, smallest=smallest)
    progress = Countdown(STAGE, [one.cost for one in warming.steps], on_progress)
    for done, warmed in enumerate(warming.run(), 1):
        if warmed.error is not None:
            _log.error("%s failed to warm up", warmed.bucket)
            raise warmed.error
        progress(done)
    if warm_up.how == "aside" and smallest:
        ran = tuple(one.bucket for one in warming.steps)
        return Warm(len(ran), Aside(Warming(executor, plan, uses=uses, without=ran), ran, capturing))
    if warm_up.how == "open":
        on_progress(Progress("open executables"))
    elif capturing is not None:
        for _ in _captured(capturing, [one.bucket for one in warming.steps], on_progress):
            pass
    executor.open_all()
    executor.compilations.ready()
    return Warm(len(warming.steps))


def _captured(capturing: Capturing, buckets: Sequence[Bucket], on_progress: OnProgress) -> Iterator[Bucket]:
    """Capture the next graph for each item requested, and report progress; some may not fit."""
    progress = Countdown(GRAPHS, [bucket.tokens + OPENING for bucket in buckets], on_progress)
    for done, bucket in enumerate(capturing.run(buckets), 1):
        progress(done)
        yield bucket


def aside(
    executor: Executor, left: Aside, on_progress: OnProgress, over: Callable[[WarmAside], None]
) -> Iterator[None]:
    """Run or capture a bucket between requests for each item requested; calls `over` at the end.

    A failing bucket is logged, and the others still run.
    """
    warming = left.warming
    progress = Countdown(STAGE, [one.cost for one in warming.steps], on_progress)
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
        yield from _aside_captured(left.capturing, ran, on_progress)
    try:
        executor.open_all()  # all are open, except those without a bucket and those that failed
    except Exception as e:  # noqa: BLE001 - logged, like a bucket's error
        _log.error("%s: %s", type(e).__name__, e)
    executor.compilations.ready()
    over(WarmAside(len(warming.steps) - len(failed), tuple(failed), seconds, executor.compilations.count))


def _aside_captured(capturing: Capturing, buckets: Sequence[Bucket], on_progress: OnProgress) -> Iterator[None]:
    """Capture between requests; a device error is logged."""
    try:
        for _ in _captured(capturing, buckets, on_progress):
            yield
    except Exception as e:  # noqa: BLE001 - logged, like a bucket's error
        _log.error("capturing graphs ended: %s: %s", type(e).__name__, e)
