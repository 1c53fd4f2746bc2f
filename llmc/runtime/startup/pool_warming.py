"""Run every graph of an embedding or scoring bundle before requests need it, through the serving function.

Each bucket runs with one text of the bucket's length, the largest first. If any shape runs, one text of each length is
run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmc.buckets.bucket import Bucket
from llmc.runtime.host import available_memory
from llmc.runtime.startup.warming import Warmed

if TYPE_CHECKING:
    from llmc.runtime.pooling.pooler import Pooler


def warm_pooler(pooler: Pooler) -> None:
    """Run every graph once. Raises the error of a graph, and closes the pooler then."""
    try:
        for warmed in PoolWarming(pooler).run():
            if warmed.error is not None:
                raise warmed.error
        pooler.encoder.compilations.ready()
    except BaseException:
        pooler.close()
        raise


class PoolWarming:
    """The runs of one warm-up: `run` opens each graph, `replay` runs it again, as in warming.py.

    A failing bucket is reported with its error, and the next ones still run.
    """

    def __init__(self, pooler: Pooler) -> None:
        found = set(pooler.plan.buckets)
        if pooler.encoder.capabilities.exact:
            found = {Bucket("prompt", 1, bucket.query, 0) for bucket in found}
        self.buckets = sorted(found, key=lambda bucket: (-bucket.batch * bucket.query, -bucket.query))
        self._pooler = pooler
        self._warm: list[Bucket] = []

    def free_memory(self) -> int | None:
        """Free bytes of the host; None if unknown."""
        return available_memory()

    def run(self) -> Iterator[Warmed]:
        """Run the next bucket for the first time, for each item requested."""
        for bucket in self.buckets:
            warmed = self._run(bucket)
            if warmed.error is None:
                self._warm.append(bucket)
            yield warmed

    def replay(self) -> Iterator[Warmed]:
        """Run each bucket again that succeeded."""
        for bucket in self._warm:
            yield self._run(bucket)

    def _run(self, bucket: Bucket) -> Warmed:
        began = time.perf_counter()
        try:
            self._pooler.warm(bucket.batch, bucket.query)
        except Exception as e:  # noqa: BLE001 - engines raise errors of their own; the caller names the bucket
            return Warmed(bucket, time.perf_counter() - began, e)
        return Warmed(bucket, time.perf_counter() - began)
