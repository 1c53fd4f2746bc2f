"""Start a prefill side with every prefill graph opened and run before the first prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.runtime.startup.opening import open_executor
from llmc.runtime.startup.warming import Warming

if TYPE_CHECKING:
    import socket

    from llmc.runtime.bundle import Bundle
    from llmc.runtime.disaggregated.server import PrefillServer
    from llmc.runtime.executors.base import Executor
    from llmc.runtime.startup.opening import EngineOptions


def warm_prompts(executor: Executor) -> None:
    """Run every prompt bucket of the executor's bundle once, and open the rest. Raises a bucket's error."""
    plan = executor.bundle.plan
    for warmed in Warming(executor, plan, without=plan.decode).run():
        if warmed.error is not None:
            raise warmed.error
    executor.open_all()
    executor.compilations.ready()


def serve_prefill(
    bundle: Bundle, options: EngineOptions, listener: socket.socket, bound: int | None = None
) -> PrefillServer:
    """Serve prompts of other processes that connect to `listener`; `bound`: see PrefillWorker.client.

    Raises ArtifactError or DeviceError if the bundle cannot be opened here.
    """
    from llmc.runtime.disaggregated.server import PrefillServer
    from llmc.runtime.disaggregated.worker import PrefillWorker

    worker = PrefillWorker(
        bundle, lambda: open_executor(bundle, options), None if options.enable_prefix_caching else 0
    )  # fmt: skip
    try:
        worker.do(warm_prompts)
    except BaseException:
        worker.close()
        raise
    return PrefillServer(worker, listener, bundle.settings.prefill_key, bound)
