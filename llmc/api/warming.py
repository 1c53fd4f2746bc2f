"""`llmc.warm_up`: the Python form of `llmc warmup`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llmc.buckets.bucket import Bucket
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.engine.engine import LLMEngine
    from llmc.runtime.startup.auxiliary import AuxiliaryRun, AuxiliaryWarming
    from llmc.runtime.startup.capturing import CaptureChoice
    from llmc.runtime.startup.opening import EngineOptions
    from llmc.runtime.startup.outcome import WarmUpOutcome
    from llmc.runtime.startup.warming import Warmed

    OnWarmUp = Callable[[WarmUpOutcome, Warmed | Bucket | AuxiliaryRun, int, int], None]


def warm_up(
    bundle: Bundle, options: EngineOptions | None = None, *, uses: Mapping[Bucket, int] | None = None,
    choice: CaptureChoice | None = None, report: OnWarmUp | None = None,
) -> WarmUpOutcome:  # fmt: skip
    """Run every bucket of a bundle twice; a bundle that embeds or scores runs each with one text.

    The buckets that `uses` counts most come first. `choice` divides the memory of a device that captures graphs.
    `report` is called with the outcome so far, what ran, and how many of how many are done. An interrupt keeps what
    ran.

    Raises ArtifactError or DeviceError if this host cannot open the bundle. Buckets that do not run are in the outcome.
    """
    from llmc.runtime.startup.opening import EngineOptions, open_engine, open_executor
    from llmc.runtime.startup.outcome import WarmUpOutcome

    options = options or EngineOptions()
    if bundle.task != "generate":
        return _warm_up_encoder(bundle, options, report)
    from llmc.runtime.startup.auxiliary import AuxiliaryWarming
    from llmc.runtime.startup.capturing import CaptureChoice, Capturing
    from llmc.runtime.startup.warming import Warming

    engine: LLMEngine | None = None
    executor = open_executor(bundle, options)

    def auxiliary() -> AuxiliaryWarming:
        nonlocal engine
        engine = open_engine(bundle, executor, options)
        return AuxiliaryWarming(engine, bundle.plan)

    try:
        capturing = Capturing.of(executor, bundle.plan, choice or CaptureChoice())
        found = WarmUpOutcome(executor, Warming(executor, bundle.plan, uses=uses), capturing, auxiliary)
        _run(found, report)
    finally:
        if engine is not None:
            engine.close()
        executor.close()
    return found


def _warm_up_encoder(bundle: Bundle, options: EngineOptions, report: OnWarmUp | None) -> WarmUpOutcome:
    from llmc.runtime.pooling.pooler import Pooler
    from llmc.runtime.startup.outcome import WarmUpOutcome
    from llmc.runtime.startup.pool_warming import PoolWarming

    pooler = Pooler(bundle, options.threads)
    try:
        found = WarmUpOutcome(pooler.encoder, PoolWarming(pooler), names={"prompt": bundle.task})
        _run(found, report)
    finally:
        pooler.close()
    return found


def _run(found: WarmUpOutcome, report: OnWarmUp | None) -> None:
    found.run(lambda ran, done, total: None if report is None else report(found, ran, done, total))
