"""A warm-up of two passes, bucket by bucket: the first run opens a graph, the second replays it.

The auxiliary graphs run between the two passes.
"""

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
    from llmc.runtime.startup.auxiliary import AuxiliaryRun, AuxiliaryWarming
    from llmc.runtime.startup.capturing import Capturing
    from llmc.runtime.startup.warming import Warmed

OnRun = Callable[["Warmed | Bucket | AuxiliaryRun", int, int], None]
"""Called after each run and each capture, with the number done and the total."""


NAMES: Mapping[Phase, str] = MappingProxyType({phase: phase for phase in PHASES})


class Openable(Protocol):
    """What a warm-up opens: an executor or an encoder."""

    @property
    def compilations(self) -> CompilationCounter:
        """Compilations of its engine."""

    @property
    def capabilities(self) -> Capabilities:
        """Its capabilities, such as whether it takes any shape."""

    def open_all(self) -> None:
        """Open everything that no bucket has opened."""


class WarmUpRuns(Protocol):
    """The runs of one warm-up."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Buckets to run, in order."""

    def free_memory(self) -> int | None:
        """Free bytes of the memory that holds the graphs; None if unknown."""

    def run(self) -> Iterator[Warmed]:
        """Run each bucket for the first time."""

    def replay(self) -> Iterator[Warmed]:
        """Run each bucket again that succeeded."""


@dataclass(frozen=True)
class PhaseRuns:
    """Counts of one phase: planned, replayed and failed buckets, and the seconds of all runs."""

    buckets: int
    warm: int
    failed: int
    first_s: float
    replay_s: float


class WarmUpOutcome:
    """Runs `warming` over `executor` and captures graphs with `capturing` (None: the device captures none).

    `memory`: free bytes before and after, on the device if it captures graphs, otherwise on the host; None if unknown.
    `names`: names of the phases, for people and JSON. `open_auxiliary` returns the auxiliary runs once the executor has
    its slots; `ready` is called before the second pass.
    """

    def __init__(
        self, executor: Openable, warming: WarmUpRuns, capturing: Capturing | None = None,
        open_auxiliary: Callable[[], AuxiliaryWarming] | None = None, ready: Callable[[], None] = lambda: None,
        names: Mapping[Phase, str] = NAMES,
    ) -> None:  # fmt: skip
        self.names = names
        self.executor = executor
        self.warming = warming
        self.capturing = capturing
        self.auxiliary: list[AuxiliaryRun] = []
        self._open_auxiliary = open_auxiliary
        self._ready = ready
        self._most_auxiliary = 0
        self.first: dict[Bucket, Warmed] = {}
        self.again: dict[Bucket, Warmed] = {}
        self.memory: tuple[int | None, int | None] = (None, None)
        self.interrupted = False
        self._graphs = 0
        self._most_graphs = 0 if capturing is None else len(warming.buckets)

    def run(self, on_progress: OnRun = lambda *_: None) -> None:
        """Divide the device's memory, run every bucket, capture graphs, and run every bucket again.

        Everything else in the bundle is opened before the second pass; whatever the engine opens after that counts as a
        compilation. An interrupt ends the warm-up and keeps its results. Raises errors of dividing memory and of
        opening an executable, unless a bucket of it has already failed.
        """
        before = self.warming.free_memory()
        try:
            if self.capturing is not None:
                self.capturing.divide()
            self._pass(self.warming.run(), self.first, on_progress)
            self._capture(on_progress)
            self._open_all()
            self._run_auxiliary(on_progress)
            self.executor.compilations.ready()
            self._ready()
            self._pass(self.warming.replay(), self.again, on_progress)
        except KeyboardInterrupt:
            self.interrupted = True
        self.memory = before, self.warming.free_memory()

    def _pass(self, runs: Iterator[Warmed], into: dict[Bucket, Warmed], on_progress: OnRun) -> None:
        for warmed in runs:
            into[warmed.bucket] = warmed
            on_progress(warmed, self._done, self._total)

    def _capture(self, on_progress: OnRun) -> None:
        if self.capturing is not None:
            for bucket in self.capturing.run([bucket for bucket in self.first if bucket not in self.failed]):
                self._graphs += 1
                on_progress(bucket, self._done, self._total)
            self._most_graphs = self._graphs

    def _run_auxiliary(self, on_progress: OnRun) -> None:
        if self._open_auxiliary is not None:
            auxiliary = self._open_auxiliary()
            self._most_auxiliary = len(auxiliary)
            for ran in auxiliary.run():
                self.auxiliary.append(ran)
                on_progress(ran, self._done, self._total)

    @property
    def _done(self) -> int:
        return len(self.first) + self._graphs + len(self.auxiliary) + len(self.again)

    @property
    def _total(self) -> int:
        """Each bucket is run, replayed, and possibly captured."""
        return 2 * len(self.warming.buckets) - len(self.failed) + self._most_graphs + self._most_auxiliary

    def _open_all(self) -> None:
        try:
            self.executor.open_all()
        except Exception:
            if not self.failed:
                raise

    @property
    def failed(self) -> dict[Bucket, Exception]:
        """Buckets that raised an error."""
        runs = [*self.first.values(), *self.again.values()]
        return {warmed.bucket: warmed.error for warmed in runs if warmed.error is not None}

    @property
    def failed_auxiliary(self) -> dict[str, Exception]:
        """Errors of the auxiliary runs."""
        return {one.name: one.error for one in self.auxiliary if one.error is not None}

    def name(self, bucket: Bucket) -> str:
        """Return a bucket's name for people."""
        return str(bucket).replace(bucket.phase, self.names[bucket.phase], 1)

    @property
    def missing(self) -> list[Bucket]:
        """Buckets that an interrupt left without a run or a replay."""
        return [b for b in self.warming.buckets if b not in self.again and b not in self.failed]

    def phase(self, phase: Phase) -> PhaseRuns:
        """Return the counts of a phase."""
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
        """Return a JSON-serializable dict: buckets as [batch, query, context] in tokens, in the order of their runs."""
        compilations, (before, after) = self.executor.compilations, self.memory
        found = {
            "phases": {name: asdict(self.phase(phase)) for phase, name in self.names.items()},
            "buckets": [self._bucket(one) for one in self.first.values()],
            "missing": [{"phase": self.names[bucket.phase], "bucket": _numbers(bucket)} for bucket in self.missing],
            "auxiliary": [
                {"name": one.name, "seconds": one.seconds, "error": _words(one.error)} for one in self.auxiliary
            ],
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
