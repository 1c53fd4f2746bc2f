"""The prefill side of an engine, from where it was asked for: a bundle, opened in this process, or an address."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llmc.artifacts.log import logger
from llmc.runtime.bundle import Bundle
from llmc.runtime.hybrid.addresses import Address
from llmc.runtime.hybrid.child import ChildPrefiller
from llmc.runtime.hybrid.facts import Facts, require_fit
from llmc.runtime.hybrid.remote import RemotePrefiller
from llmc.runtime.hybrid.worker import PrefillWorker

if TYPE_CHECKING:
    from pathlib import Path

    from llmc.runtime.engine.handover import Prefiller
    from llmc.runtime.executors.base import Executor


PROCESS = "process:"
"""Before a bundle: it is opened in a process of its own."""


def open_prefiller(
    prefill: str | Path, bundle: Bundle, executor: Executor, open_executor: Callable[[Bundle], Executor],
    min_prefix: int | None = None,
) -> Prefiller:  # fmt: skip
    """What computes the prompts of `bundle`, which is open on `executor`: the bundle `prefill`, in this process or
    with "process:" before it in a process of its own, or who listens at that address.

    `open_executor` opens the other one, in the thread that is to run it; `min_prefix` as in SchedulerConfig. Raises
    ArtifactError or DeviceError where the prefill side cannot be opened, or does not fit `bundle`.
    """
    if str(prefill).startswith(PROCESS):
        other = str(prefill).removeprefix(PROCESS)
        return ChildPrefiller(other, Facts.of(bundle, executor), bundle.settings.prefill_key)
    address = Address.parse(str(prefill))
    if address is not None:
        return RemotePrefiller(address, Facts.of(bundle, executor), bundle.settings.prefill_key)
    opened = Bundle.open(prefill, bundle.settings)
    worker = PrefillWorker(opened, lambda: open_executor(opened), min_prefix)
    try:
        told = require_fit(worker.facts, Facts.of(bundle, executor))
    except BaseException:
        worker.close()
        raise
    for difference in told:
        logger().warning("hybrid of %s and %s: %s", opened.path, bundle.path, difference)
    return worker.client(owned=True)
