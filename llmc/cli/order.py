"""Recorded requests that say which buckets are warmed up first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from llmc.cli.options import option

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llmc.buckets.bucket import Bucket
    from llmc.buckets.plan import Plan

OrderFlag = Annotated[
    str | None, option("--traffic", "FILE", "Recorded requests: warm the buckets up first that they use most.")
]


def uses_in(file: str) -> Callable[[Plan], Mapping[Bucket, int]]:
    """How often the requests in `file` use each bucket of a plan. The file is opened now, and read when a plan is
    there. Raises InputError for a file that cannot be read."""
    from llmc.buckets.evaluation.replay import uses_of
    from llmc.cli.planning import PlanningFlags, open_traffic

    traffic = open_traffic(PlanningFlags(traffic=file), "order the buckets")
    return lambda plan: uses_of(plan, traffic)
