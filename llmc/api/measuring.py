"""The Python forms of `llmc bench`, `plan evaluate` and `warmup`: `measure`, `evaluate`, `warm_up` and `certify`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llmc.bench.bucket_times import Progress
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.cost.bench import Bench
    from llmc.buckets.evaluation.replay import Evaluation
    from llmc.buckets.plan import Plan
    from llmc.buckets.traffic.source import Traffic
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.certificate.certifying import OnStage
    from llmc.runtime.certificate.document import Certificate
    from llmc.runtime.engine.engine import LLMEngine
    from llmc.runtime.startup.auxiliary import AuxiliaryRun, AuxiliaryWarming
    from llmc.runtime.startup.capturing import CaptureChoice
    from llmc.runtime.startup.opening import EngineOptions
    from llmc.runtime.startup.outcome import WarmUpOutcome
    from llmc.runtime.startup.warming import Warmed

    OnWarmUp = Callable[[WarmUpOutcome, Warmed | Bucket | AuxiliaryRun, int, int], None]


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


def certify(
    bundle: str | Path,
    output: str | Path | None = None,
    *,
    requests: int = 500,
    seed: int = 0,
    sign: str | Path | None = None,
    threads: int | None = None,
    weights: str | Path | None = None,
    report: OnStage | None = None,
) -> Certificate:
    """Warm a bundle up, run random requests of every kind, and certify that nothing was compiled meanwhile.

    The certificate is written to `output` and signed with the private key file `sign`, or not signed if None. `weights`
    is the checkpoint for a bundle compiled without weights. `report` is called with the stage, a text, and how much of
    how much is done. Compilations of any thread in this process count, so run nothing else in it.

    Raises CompiledError if something was compiled, LlmcError if a bucket does not run, VerificationError if a request
    fails, InputError for an unusable key, and what opening the bundle raises. In these cases nothing is written.
    """
    from llmc.api import bundle_of
    from llmc.artifacts.signing.signer import Signer
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.certificate.certifying import Certifying, CertifyOptions
    from llmc.runtime.certificate.document import write_file
    from llmc.runtime.startup.opening import EngineOptions
    from llmc.settings import Settings

    signer = None if sign is None else Signer.load(sign, Settings.from_environment().signing_passphrase)
    opened = Bundle.open(bundle_of(str(bundle), weights=None if weights is None else str(weights)))
    run = Certifying(opened, EngineOptions(threads), CertifyOptions(requests, seed), report or (lambda *_: None))
    built = run.run()
    if output is not None:
        write_file(Path(output), built, signer)
    return built
