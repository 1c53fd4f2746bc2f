"""Time each bucket of a bundle on this host, to make and evaluate plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost.bench import UNMEASURED, Bench, Measurement
from llmc.runtime.executors import open_executor
from llmc.runtime.host import cpu_features
from llmc.runtime.step import pad

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.base import Executor

Progress = Callable[[Bucket, float, int, int], None]

LEAST_SAMPLES = 3
MOST_SAMPLES = 20
SLOW = 1.0
"""Steps longer than this many seconds need only one sample, because noise is small in comparison."""


def measure(
    bundle: Bundle, *, seconds: float = 0.3, threads: int | None = None, report: Progress | None = None
) -> Bench:
    """Replay every bucket of the bundle's plan with all rows live, and take the median time.

    A bucket runs once unmeasured, then for about `seconds`: at least LEAST_SAMPLES times (once if a step takes over
    SLOW seconds) and at most MOST_SAMPLES times. Each run pads token ids anew, as the engine does. `report` is called
    after each bucket with the bucket, its seconds, and how many of how many are done.

    An interrupt (KeyboardInterrupt) ends it early: the result names the missing buckets (`Bench.unmeasured`). If
    nothing was measured, it is raised again. Raises ArtifactError or DeviceError if this host cannot run the bundle.
    """
    executor, buckets = open_executor(bundle, threads=threads), bundle.plan.buckets
    found: list[Measurement] = []
    try:
        executor.open_all()
        vocabulary = bundle.size("vocab_size")
        for done, bucket in enumerate(buckets, 1):
            times = _times(executor, bucket, vocabulary, seconds)
            found.append(Measurement(bucket, median(times), samples=len(times)))
            if report is not None:
                report(bucket, found[-1].seconds, done, len(buckets))
    except KeyboardInterrupt:
        if not found:
            raise
    finally:
        executor.close()
    more: dict[str, object] = {
        "threads": threads or bundle.settings.threads, "toolchain": dict(bundle.manifest.toolchain),
        "isa": list(bundle.manifest.isa and cpu_features()),
    }  # fmt: skip
    if left := [str(bucket) for bucket in buckets[len(found) :]]:
        more[UNMEASURED] = left
    return Bench(bundle.manifest.device, tuple(found), str(bundle.path), more)


def _times(executor: Executor, bucket: Bucket, vocabulary: int, budget: float) -> Sequence[float]:
    past = min(bucket.context, executor.capacity - bucket.query)
    for slot in range(executor.slots):
        held = past if slot < bucket.batch else 0
        empty = executor.export_prefix(slot, 0)
        executor.import_prefix(slot, [np.zeros((t.shape[0], held, t.shape[2]), np.float32) for t in empty])
    tokens = np.random.default_rng(bucket.tokens).integers(1, vocabulary, (bucket.batch, bucket.query)).tolist()
    slots = range(bucket.batch)
    times: list[float] = []
    while not enough(times, budget):
        began = time.perf_counter()
        executor.run(pad(bucket, slots, tokens, [past] * bucket.batch))
        times.append(time.perf_counter() - began)
    return times[1:]


def enough(times: Sequence[float], budget: float) -> bool:
    """Whether `times`, without the first, are enough samples for `budget` seconds."""
    counted = times[1:]
    if not counted:
        return False
    least = 1 if counted[0] > SLOW else LEAST_SAMPLES
    return len(counted) >= least and (sum(counted) >= budget or len(counted) >= MOST_SAMPLES)
