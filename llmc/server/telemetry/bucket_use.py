"""Use of each bucket of the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llmc.buckets.bucket import Phase
    from llmc.buckets.plan import Plan
    from llmc.runtime.engine.observer import StepRecord

MAX_SHAPES = 1024
"""Maximum number of distinct shapes while no plan is known."""


class BucketKey(NamedTuple):
    """A bucket; batch 0 stands for all steps without a bucket."""

    phase: str
    batch: int
    query: int
    context: int

    @property
    def label(self) -> str:
        """Name in metrics: batch x query + context."""
        return f"{self.batch}x{self.query}+{self.context}" if self.batch else "other"


class StepSums:
    """Sums over the steps of one bucket: steps, live rows, new tokens (live and padding), seconds of each part."""

    __slots__ = ("execute_s", "live", "padding", "prepare_s", "rows", "sample_s", "schedule_s", "steps")

    def __init__(self) -> None:
        self.steps = self.rows = self.live = self.padding = 0
        self.schedule_s = self.prepare_s = self.execute_s = self.sample_s = 0.0

    def add(self, record: StepRecord) -> None:
        """Count one step."""
        self.steps += 1
        self.rows += record.live_rows
        self.live += record.live_tokens
        self.padding += record.padding_tokens
        self.schedule_s += record.schedule_s
        self.prepare_s += record.prepare_s
        self.execute_s += record.execute_s
        self.sample_s += record.sample_s

    def merge(self, other: StepSums) -> None:
        """Add the sums of `other`."""
        self.steps += other.steps
        self.rows += other.rows
        self.live += other.live
        self.padding += other.padding
        self.schedule_s += other.schedule_s
        self.prepare_s += other.prepare_s
        self.execute_s += other.execute_s
        self.sample_s += other.sample_s

    def copy(self) -> StepSums:
        """Return an independent copy."""
        twin = StepSums()
        twin.merge(self)
        return twin

    @property
    def seconds(self) -> float:
        """Seconds of all parts."""
        return self.schedule_s + self.prepare_s + self.execute_s + self.sample_s


class BucketSums:
    """Use by bucket. Not thread-safe.

    Executables that take any shape run steps outside the buckets of `plan`. Such a step counts for the least-cost
    bucket that covers it, which bounds the number of keys.
    """

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = plan
        self.uses: dict[BucketKey, StepSums] = {}
        self._planned = _keys(plan)

    def bind(self, plan: Plan) -> None:
        """Count by the buckets of `plan` from now on."""
        self.plan, self._planned = plan, _keys(plan)

    def add(self, record: StepRecord) -> None:
        """Count one step."""
        use = self.uses.get((record.phase, record.batch, record.query, record.context))  # type: ignore[call-overload]
        if use is None:
            use = self._use(record)
        use.add(record)

    def take(self) -> dict[BucketKey, StepSums]:
        """Return the counts since the last call, and reset them."""
        taken, self.uses = self.uses, {}
        return taken

    def copy(self) -> dict[BucketKey, StepSums]:
        """Return a copy of the counts so far."""
        return {key: use.copy() for key, use in self.uses.items()}

    def _use(self, record: StepRecord) -> StepSums:
        key = BucketKey(record.phase, record.batch, record.query, record.context)
        if not (len(self.uses) < MAX_SHAPES if self.plan is None else key in self._planned):
            key = self._covering(record)
        return self.uses.setdefault(key, StepSums())

    def _covering(self, record: StepRecord) -> BucketKey:
        if self.plan is not None:
            phase: Phase = "decode" if record.phase == "decode" else "prompt"
            bucket = self.plan.lookup(phase, record.batch, record.query, record.context)
            if bucket is not None:
                return BucketKey(bucket.phase, bucket.batch, bucket.query, bucket.context)
        return BucketKey(record.phase, 0, 0, 0)


def merged(into: dict[BucketKey, StepSums], more: dict[BucketKey, StepSums]) -> None:
    """Add the sums of `more` to those of `into`."""
    for key, use in more.items():
        if key in into:
            into[key].merge(use)
        else:
            into[key] = use.copy()


def _keys(plan: Plan | None) -> frozenset[BucketKey]:
    return frozenset(BucketKey(b.phase, b.batch, b.query, b.context) for b in (plan.buckets if plan else ()))
