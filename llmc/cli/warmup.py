"""`llmc warmup`: every bucket of a bundle run twice on this host, through the function that serves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.buckets.bucket import Bucket
from llmc.cli import output as messages
from llmc.cli.capturing import UNCAPTURED_SHOWN, CaptureFlags, takes_capture_flags
from llmc.cli.grouped_help import GroupedCommand
from llmc.cli.interrupts import EXIT, sigterm_interrupts
from llmc.cli.options import BundleArgument, EagerFlag, StoreFlag, ThreadsFlag, WeightsFlag, option
from llmc.cli.order import OrderFlag, uses_in
from llmc.cli.output import echo
from llmc.errors import InputError, LlmcError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmc.runtime.bundle import Bundle
    from llmc.runtime.engine.engine import LLMEngine
    from llmc.runtime.startup.beside import BesideWarming, RanBeside
    from llmc.runtime.startup.capturing import CaptureChoice
    from llmc.runtime.startup.opening import EngineOptions
    from llmc.runtime.startup.outcome import WarmUpOutcome
    from llmc.runtime.startup.warming import Warmed

REQUESTS = 500
"""Random requests of a certificate where no number is named."""
SHOWN = 8
"""Buckets that a line of error names; all are in the JSON."""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("warmup", cls=GroupedCommand)(takes_capture_flags(warmup))


def warmup(
    bundle: BundleArgument,
    *,
    flags: CaptureFlags,
    traffic: OrderFlag = None,
    finish: Annotated[
        bool,
        typer.Option("--finish/--no-finish", help="Finish portable executables first, on their device's own host."),
    ] = True,
    enforce_eager: EagerFlag = False,
    threads: ThreadsFlag = None,
    weights: WeightsFlag = None,
    certify: Annotated[
        Path | None, option("--certify", "OUT.json", "Then run random requests, and certify that nothing was compiled.")
    ] = None,
    requests: Annotated[
        int | None, option("--requests", "N", f"Random requests of a certificate. Default: {REQUESTS}.", min=1)
    ] = None,
    seed: Annotated[int | None, option("--seed", "S", "What makes them repeatable. Default: 0.", min=0)] = None,
    sign: Annotated[
        Path | None, option("--sign", "PRIVATE", "Key that signs the certificate. Default: LLMC_SIGNING_KEY.")
    ] = None,
    cache_dir: StoreFlag = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Run every bucket of a bundle twice, as requests would: the first run opens its graph, the second replays it.

    In between runs what else a device may compile when it is met first: each kind of sampling at each decode batch, top
    logits, and moves of cached prefixes. A bundle of a configuration alone takes the weights of --weights.

    The largest bucket comes first, with --traffic the one that is used most; -v has a line for each. Where any shape
    runs, a prompt and a decode step are all there is. An interrupt shows what ran until then. On the host of its
    device, a portable bundle is finished first.

    A device that captures graphs is first measured by a profile run. What is free then is divided between the KV cache
    and the graphs, and as many buckets get a graph as fit; the others run without one, and are named.

    Of a bundle that embeds or scores every bucket runs with one text; where any shape runs, a text of each length.

    With --certify, random requests of every kind run through the engine then, and witnesses say what was compiled
    meanwhile: docs/certificates.md. Where anything was, it is named, and no certificate is written.

    Exits 1 and names the buckets where some did not run (the others are run all the same), where no graph fits, and
    where something was compiled; 4 where a request's answer is another one alone.

    \b
    Example:
      llmc warmup bundle
      llmc warmup bundle --certify bundle.certificate.json --requests 1000 --sign release
      llmc warmup bundle --traffic requests.csv --json
      llmc warmup bundle -v
      llmc warmup bge-bundle --threads 2
      llmc warmup bundle --gpu-memory-utilization 0.9 --graph-reserved-mem 0.4 --graph-prompt-ratio 0.5
    """
    from llmc.artifacts.local.opening import open_store
    from llmc.artifacts.local.references import resolve
    from llmc.cli.finishing import finish_first
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.startup.opening import EngineOptions
    from llmc.settings import Settings

    asked = [name for name, value in (("requests", requests), ("seed", seed), ("sign", sign)) if value is not None]
    if asked and certify is None:
        raise InputError(f"--{asked[0]} is of a certificate: name its file with --certify OUT.json")
    settings = Settings.from_environment()
    store = open_store(cache_dir, settings)
    folder = resolve(bundle, settings, store)
    if (opened := Bundle.open(folder)).task != "generate":
        given = {
            "--traffic": traffic, "--weights": weights, "--certify": certify, "--enforce-eager": enforce_eager or None,
            **dict.fromkeys(flags.choice(settings).flags, True),
        }  # fmt: skip
        if flag := next((name for name, value in given.items() if value is not None), None):
            raise InputError(f"{flag} is for models that generate; leave it out for a bundle to {opened.task}")
        _shown(_pooled(opened, threads, as_json and not sys.stderr.isatty()), bundle, opened, as_json)
        return
    if weights is not None:
        from llmc.compiler.pipeline.bind import bound

        folder = bound(folder, weights, store)
    opened = Bundle.open(folder)
    if finish:
        opened = finish_first(opened, store, settings, as_json)
    choice = flags.choice(settings)
    uses = None if traffic is None else uses_in(traffic)(opened.plan)
    options = EngineOptions(threads, enforce_eager=enforce_eager)
    hidden = messages.verbose or (as_json and not sys.stderr.isatty())
    if certify is not None:
        from llmc.cli.certifying import certify_bundle
        from llmc.runtime.certificate.certifying import CertifyOptions

        wanted = CertifyOptions(requests or REQUESTS, seed or 0, uses, choice)
        certify_bundle(bundle, opened, certify, sign, options, wanted, as_json, hidden)
        return
    _shown(_warmed(opened, options, uses, choice, hidden), bundle, opened, as_json)


def _shown(found: WarmUpOutcome, bundle: str, opened: Bundle, as_json: bool) -> None:
    """Print what ran. Raises LlmcError that names what did not run here, and ends the command after an interrupt."""
    if as_json:
        echo(json.dumps({"bundle": bundle, "device": opened.manifest.device, **found.to_dict()}))
    else:
        echo(_text(found, bundle, opened.manifest.device))
    if found.failed or found.failed_beside:
        raise LlmcError(f"{bundle}: {_failures(found)}")
    if found.capturing is not None and found.capturing.failure and not found.interrupted:
        raise LlmcError(f"{bundle}: {found.capturing.failure}")
    if found.interrupted:
        echo(f"llmc: not warmed up: {len(found.missing)} of {len(found.warming.buckets)} buckets", err=True)
        raise typer.Exit(EXIT)


def _warmed(
    bundle: Bundle, options: EngineOptions, uses: Mapping[Bucket, int] | None, choice: CaptureChoice, hidden: bool
) -> WarmUpOutcome:
    from llmc.runtime.startup.beside import BesideWarming
    from llmc.runtime.startup.capturing import Capturing
    from llmc.runtime.startup.opening import open_engine, open_executor
    from llmc.runtime.startup.outcome import WarmUpOutcome
    from llmc.runtime.startup.warming import Warming

    engine: LLMEngine | None = None
    executor = open_executor(bundle, options)

    def beside() -> BesideWarming:
        nonlocal engine
        engine = open_engine(bundle, executor, options)
        return BesideWarming(engine, bundle.plan)

    try:
        capturing = Capturing.of(executor, bundle.plan, choice)
        found = WarmUpOutcome(executor, Warming(executor, bundle.plan, uses=uses), capturing, beside)
        with sigterm_interrupts(), messages.StepProgress("warm up", hidden) as bar:
            found.run(lambda ran, done, total: bar(_line(ran, found), done, total))
    finally:
        if engine is not None:
            engine.close()
        executor.close()
    return found


def _pooled(bundle: Bundle, threads: int | None, hidden: bool) -> WarmUpOutcome:
    """The same of a bundle without a cache."""
    from llmc.runtime.pooling.pooler import Pooler
    from llmc.runtime.startup.outcome import WarmUpOutcome
    from llmc.runtime.startup.pool_warming import PoolWarming

    pooler = Pooler(bundle, threads)
    try:
        found = WarmUpOutcome(pooler.encoder, PoolWarming(pooler), names={"prompt": bundle.task})
        with sigterm_interrupts(), messages.StepProgress("warm up", hidden) as bar:
            found.run(lambda ran, done, total: bar(_line(ran, found), done, total))
    finally:
        pooler.close()
    return found


def _line(ran: Warmed | Bucket | RanBeside, found: WarmUpOutcome) -> str:
    if isinstance(ran, Bucket):
        return f"{ran}: captured"
    from llmc.runtime.startup.warming import Warmed

    name = found.name(ran.bucket) if isinstance(ran, Warmed) else ran.name
    return f"{name}: " + (f"{ran.seconds:.3f} s" if ran.error is None else f"failed: {ran.error}")


def _text(found: WarmUpOutcome, bundle: str, device: str) -> str:
    """A line a phase, and what the engine counted."""
    from llmc.buckets.render.text import size_text, table

    rows = [("", "buckets", "warm", "failed", "first run", "replay")]
    for phase, name in found.names.items():
        of = found.phase(phase)
        rows.append((
            name, str(of.buckets), str(of.warm), str(of.failed), f"{of.first_s:.3f} s", f"{of.replay_s:.3f} s"
        ))  # fmt: skip
    counted = found.executor.compilations
    opened = f"; by the toolchain at open: {n}" if (n := len(counted.at_open)) else ""
    lines = [f"{bundle} on {device}", *table(rows, (1, 2, 3, 4, 5))]
    if found.beside:
        seconds = sum(ran.seconds for ran in found.beside)
        lines.append(f"beside: {len(found.beside)} kinds of sampling, top logits and moves in {seconds:.3f} s")
    lines.append(f"compilations: {counted.count}{opened}")
    if found.executor.capabilities.exact:
        runs = "a prompt and a decode step warm" if len(found.names) > 1 else "a text of each length warms"
        lines.insert(1, f"any shape runs as it is: {runs} it up")
    before, after = found.memory
    if before is not None and after is not None:
        place = "host" if found.capturing is None else "device"
        lines.append(f"free {place} memory: {size_text(before)} before, {size_text(after)} after")
    if found.capturing is not None:
        lines += ["", *found.capturing.report(None if messages.verbose else UNCAPTURED_SHOWN)]
    return "\n".join(lines)


def _failures(found: WarmUpOutcome) -> str:
    named: dict[str, Exception] = {found.name(bucket): error for bucket, error in found.failed.items()}
    kind = "of its buckets" if named else "of what is warmed beside its buckets"
    named = named or found.failed_beside
    some = "; ".join(f"{name}: {type(e).__name__}: {e}" for name, e in list(named.items())[:SHOWN])
    more = f"; and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
    return f"{len(named)} {kind} {'does' if len(named) == 1 else 'do'} not run here: {some}{more}"
