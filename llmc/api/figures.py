"""`llmc.evaluate` and `llmc.measure`: what `llmc plan evaluate` and `llmc bench` do, from Python."""

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
    """Replay recorded requests on a plan: what each bucket pads, which are not used, and what none covers.

    `plan` and `bench` may be files. `traffic` is a trace file, its requests arriving as recorded or at `arrival_rate`
    requests a second; requests above the plan's limits are left out, or with `clip` cut to them; or a
    `llmc.buckets.traffic.source.Traffic`, which says all that itself. With `bench` the seconds of all steps are known.
    A notebook shows the result as tables. Raises InputError for what cannot be read, and for a bench or a rate beside a
    Traffic.
    """
    from llmc.buckets.cost.bench import Bench
    from llmc.buckets.evaluation.replay import replay
    from llmc.buckets.plan import Plan
    from llmc.buckets.traffic.source import Traffic
    from llmc.errors import InputError

    built = plan if isinstance(plan, Plan) else Plan.load(plan)
    if isinstance(traffic, Traffic):
        if bench is not None or clip or arrival_rate is not None:
            raise InputError("bench, clip and arrival_rate are the Traffic's own: give them to it")
        return replay(built, traffic)
    measured = bench if bench is None or isinstance(bench, Bench) else Bench.load(bench)
    return replay(built, Traffic(traffic, arrival_rate, clip=clip, bench=measured))


def measure(
    bundle: Bundle | str | Path, *, seconds: float = 0.3, threads: int | None = None, report: Progress | None = None
) -> Bench:
    """Seconds that each bucket of a bundle takes on this host, each run for about `seconds` with `threads` threads.

    `bundle` may be a folder or a reference. `report` is called after each bucket with it, its seconds, and how many of
    how many are done; an interrupt keeps what was measured (`Bench.unmeasured` names the rest). `Bench.save` writes a
    file for `llmc plan --bench`; a notebook shows a table. Raises ArtifactError or DeviceError when this host cannot
    run the bundle.
    """
    from llmc.bench.bucket_times import measure as time_buckets
    from llmc.runtime.bundle import Bundle

    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    return time_buckets(opened, seconds=seconds, threads=threads, report=report)
