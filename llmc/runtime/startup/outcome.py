"""What a warm-up of two passes did, bucket by bucket: the first run opens a graph, the second replays it. Between the
two, what is warmed beside the buckets runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from llmc.buckets.bucket import PHASES, Bucket, Phase
from llmc.buckets.capture.log import to_dict

if TYPE_CHECKING:
    from llmc.runtime.executors.base import Capabilities
    from llmc.runtime.executors.compilations import CompilationCounter
    from llmc.runtime.startup.beside import BesideWarming, RanBeside
    from llmc.runtime.startup.capturing import Capturing
    from llmc.runtime.startup.warming import Warmed

Report = Callable[["Warmed | Bucket | RanBeside", int, int], None]
"""Hears of each run, and of each bucket that was captured; how many are done, and how many there are."""


NAMES: Mapping[Phase, str] = MappingProxyType({phase: phase for phase in PHASES})


class Openable(Protocol):
    """What is warmed up: an executor, or an encoder."""

    @property
    def compilations(self) -> CompilationCounter:
        """What its engine compiled."""

    @property
    def capabilities(self) -> Capabilities:
        """Whether any shape runs as it is, and more."""

    def open_all(self) -> None:
        """Open what no bucket has opened."""


class WarmUpRuns(Protocol):
    """The runs of one warm-up."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Those that are run, in order."""

    def free_memory(self) -> int | None:
        """Bytes free where graphs lie; None where that is not said."""

    def run(self) -> Iterator[Warmed]:
        """Run each for the first time."""

    def replay(self) -> Iterator[Warmed]:
        """Run those again that ran."""


@dataclass(frozen=True)
class PhaseRuns:
    """One phase: buckets that were to be run, those that ran twice, those that failed; seconds of all runs."""

    buckets: int
    warm: int
    failed: int
    first_s: float
    replay_s: float


class WarmUpOutcome:
    """The runs of `warming` over `executor`, by bucket, and the graphs of `capturing`, None where the device captures
    none.

    `memory` is what was free before and after, in bytes: on a device that captures graphs, of any other in the host;
    None where it does not say. `names` are those of the phases that there are, for people and JSON. `open_beside` gives
    what is warmed beside the buckets, once the executor has its slots; `ready` is called before the second pass.
    """

    def __init__(
        self, executor: Openable, warming: WarmUpRuns, capturing: Capturing | None = None,
        open_beside: Callable[[], BesideWarming] | None = None, ready: Callable[[], None] = lambda: None,
        names: Mapping[Phase, str] = NAMES,
    ) -> None:  # fmt: skip
        self.names = names
        self.executor = executor
        self.warming = warming
        self.capturing = capturing
        self.beside: list[RanBeside] = []
        self._open_beside = open_beside
        self._ready = ready
        self._most_beside = 0
        self.first: dict[Bucket, Warmed] = {}
        self.again: dict[Bucket, Warmed] = {}
        self.memory: tuple[int | None, int | None] = (None, None)
        self.interrupted = False
        self._graphs = 0
        self._most_graphs = 0 if capturing is None else len(warming.buckets)

    def run(self, tell: Report = lambda *_: None) -> None:
        """Divide the device's memory and make the KV cache; run every bucket; capture; run every bucket again.

        Before that second pass all else that the bundle has is opened, and what is warmed beside runs: what the engine
        opens from then on counts as a compilation. An interrupt ends it and keeps what ran. Raises what opening an
        executable raises, unless a bucket of it has failed already, and what dividing the memory does.
        """
        before = self.warming.free_memory()
        try:
            if self.capturing is not None:
                self.capturing.divide()
            self._pass(self.warming.run(), self.first, tell)
            self._capture(tell)
            self._open_all()
            self._run_beside(tell)
            self.executor.compilations.ready()
            self._ready()
            self._pass(self.warming.replay(), self.again, tell)
        except KeyboardInterrupt:
            self.interrupted = True
        self.memory = before, self.warming.free_memory()

    def _pass(self, runs: Iterator[Warmed], into: dict[Bucket, Warmed], tell: Report) -> None:
        for warmed in runs:
            into[warmed.bucket] = warmed
            tell(warmed, self._done, self._total)

    def _capture(self, tell: Report) -> None:
        if self.capturing is not None:
            for bucket in self.capturing.run([bucket for bucket in self.first if bucket not in self.failed]):
                self._graphs += 1
                tell(bucket, self._done, self._total)
            self._most_graphs = self._graphs

    def _run_beside(self, tell: Report) -> None:
        if self._open_beside is not None:
            beside = self._open_beside()
            self._most_beside = len(beside)
            for ran in beside.run():
                self.beside.append(ran)
                tell(ran, self._done, self._total)

    @property
    def _done(self) -> int:
        return len(self.first) + self._graphs + len(self.beside) + len(self.again)

    @property
    def _total(self) -> int:
        """Each bucket is run and replayed, and may be captured."""
        return 2 * len(self.warming.buckets) - len(self.failed) + self._most_graphs + self._most_beside

    def _open_all(self) -> None:
        try:
            self.executor.open_all()
        except Exception:
            if not self.failed:
                raise

    @property
    def failed(self) -> dict[Bucket, Exception]:
        """Buckets that raised."""
        runs = [*self.first.values(), *self.again.values()]
        return {warmed.bucket: warmed.error for warmed in runs if warmed.error is not None}

    @property
    def failed_beside(self) -> dict[str, Exception]:
        """What raised beside the buckets."""
        return {one.name: one.error for one in self.beside if one.error is not None}

    def name(self, bucket: Bucket) -> str:
        """A bucket's name, for people."""
        return str(bucket).replace(bucket.phase, self.names[bucket.phase], 1)

    @property
    def missing(self) -> list[Bucket]:
        """Buckets that an interrupt left out, or whose replay it did."""
        return [b for b in self.warming.buckets if b not in self.again and b not in self.failed]

    def phase(self, phase: Phase) -> PhaseRuns:
        """The counts of a phase."""
        first, again = (
            [w for bucket, w in runs.items() if bucket.phase == phase and w.error is None]
            for runs in (self.first, self.again)
        )
        return PhaseRuns(
            sum(bucket.phase == phase for bucket in self.warming.buckets),
            len(again),
            sum(bucket.phase == phase for bucket in self.failed),
            sum(warmed.seconds for warmed in first),
            sum(warmed.seconds for warmed in again),
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it: buckets as [batch, query, context] in tokens, in the order in which they were run."""
        compilations, (before, after) = self.executor.compilations, self.memory
        found = {
            "phases": {name: asdict(self.phase(phase)) for phase, name in self.names.items()},
            "buckets": [self._bucket(one) for one in self.first.values()],
            "missing": [{"phase": self.names[bucket.phase], "bucket": _numbers(bucket)} for bucket in self.missing],
            "beside": [{"name": one.name, "seconds": one.seconds, "error": _words(one.error)} for one in self.beside],
            "compilations": list(compilations.compiled),
            "compilations_at_open": list(compilations.at_open),
            "free_memory": {"before": before, "after": after},
            "interrupted": self.interrupted,
        }
        if self.capturing is not None:
            memory, graphs = self.capturing.memory, self.capturing.outcome
            found["memory"] = None if memory is None else memory.to_dict()
            found["graphs"] = None if graphs is None else to_dict(graphs)
        return found

    def _bucket(self, one: Warmed) -> dict[str, Any]:
        error, again = self.failed.get(one.bucket), self.again.get(one.bucket)
        return {
            "phase": self.names[one.bucket.phase],
            "bucket": _numbers(one.bucket),
            "first_s": one.seconds,
            "replay_s": None if again is None else again.seconds,
            "error": _words(error),
        }


def _numbers(bucket: Bucket) -> list[int]:
    return [bucket.batch, bucket.query, bucket.context]


def _words(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
