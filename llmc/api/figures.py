"""`llmc.evaluate` and `llmc.measure`: the Python forms of `llmc plan evaluate` and `llmc bench`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.bench.bucket_times import Progress
    from llmc.buckets.cost.bench import Bench
    from llmc.buckets.evaluation.replay import Evaluation
    from llmc.buckets.plan import Plan
    from llmc.buckets.traffic.source import Traffic
    from llmc.runtime.bundle import Bundle


def evaluate(
    plan: Plan | str | os.PathLike[str], traffic: Traffic | str | os.PathLike[str], *,
    bench: Bench | str | os.PathLike[str] | None = None, clip: bool = False, arrival_rate: float | None = None,
) -> Evaluation:  # fmt: skip
    """Replay recorded requests on a plan: each bucket's padding, unused buckets, and steps that none covers.

    `plan` and `bench` may be files. `traffic` is a trace file or a `llmc.buckets.traffic.source.Traffic`. Requests of a
    file arrive as recorded or at `arrival_rate` requests per second; those above the plan's limits are skipped, or
    clipped with `clip`. With `bench` the steps are also timed in seconds. Notebooks show the result as tables.

    Raises InputError for files that cannot be read, and for bench, clip or arrival_rate with a Traffic, which has its
    own.
    """
    from llmc.buckets.cost.bench import Bench
    from llmc.buckets.evaluation.replay import replay
    from llmc.buckets.plan import Plan
    from llmc.buckets.traffic.source import Traffic
    from llmc.errors import InputError

    built = plan if isinstance(plan, Plan) else Plan.load(plan)
    if isinstance(traffic, Traffic):
        if bench is not None or clip or arrival_rate is not None:
            raise InputError("a Traffic has its own bench, clip and arrival_rate: set them there")
        return replay(built, traffic)
    measured = bench if bench is None or isinstance(bench, Bench) else Bench.load(bench)
    return replay(built, Traffic(traffic, arrival_rate, clip=clip, bench=measured))


def measure(
    bundle: Bundle | str | Path, *, seconds: float = 0.3, threads: int | None = None, report: Progress | None = None
) -> Bench:
    """Measure the seconds of each bucket of a bundle on this host, running each for about `seconds` with `threads`
    threads.

    `bundle` may be a folder or a reference. `report` is called after each bucket with the bucket, its seconds, and how
    many of how many are done. An interrupt keeps what was measured; `Bench.unmeasured` names the rest. `Bench.save`
    writes a file for `llmc plan --bench`; notebooks show a table. Raises ArtifactError or DeviceError if this host
    cannot run the bundle.
    """
    from llmc.bench.bucket_times import measure as time_buckets
    from llmc.runtime.bundle import Bundle

    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    return time_buckets(opened, seconds=seconds, threads=threads, report=report)
