"""The prefill side of an engine, from where it was asked for: a bundle, opened in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llmc.artifacts.log import logger
from llmc.runtime.bundle import Bundle
from llmc.runtime.hybrid.facts import Facts, require_fit
from llmc.runtime.hybrid.worker import PrefillWorker

if TYPE_CHECKING:
    from pathlib import Path

    from llmc.runtime.engine.handover import Prefiller
    from llmc.runtime.executors.base import Executor


def open_prefiller(
    prefill: str | Path, bundle: Bundle, executor: Executor, open_executor: Callable[[Bundle], Executor],
    min_prefix: int | None = None,
) -> Prefiller:  # fmt: skip
    """What computes, with the bundle `prefill`, the prompts of `bundle`, which is open on `executor`.

    `open_executor` opens the other one, in the thread that is to run it; `min_prefix` as in SchedulerConfig. Raises
    ArtifactError or DeviceError where the prefill side cannot be opened, or does not fit `bundle`.
    """
    other = Bundle.open(prefill, bundle.settings)
    worker = PrefillWorker(other, lambda: open_executor(other), min_prefix)
    try:
        told = require_fit(worker.facts, Facts.of(bundle, executor))
    except BaseException:
        worker.close()
        raise
    for difference in told:
        logger().warning("hybrid of %s and %s: %s", other.path, bundle.path, difference)
    return worker.client(owned=True)
