"""`llmc warmup`: run every bucket of a bundle twice on this host, through the serving code path."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmc.buckets.bucket import Bucket
from llmc.cli import output as messages
from llmc.cli.compile import on_target_first
from llmc.cli.options import (
    UNCAPTURED_SHOWN,
    CaptureFlags,
    bundle_argument,
    eager_flag,
    flag,
    order_flag,
    store_flag,
    switch,
    threads_flag,
    weights_flag,
)
from llmc.cli.output import EXIT, echo, sigterm_interrupts
from llmc.cli.planning import uses_in
from llmc.cli.verify import certify_bundle
from llmc.errors import InputError, LlmcError
from llmc.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmc.runtime.bundle import Bundle
    from llmc.runtime.startup.auxiliary import AuxiliaryRun
    from llmc.runtime.startup.capturing import CaptureChoice
    from llmc.runtime.startup.opening import EngineOptions
    from llmc.runtime.startup.outcome import WarmUpOutcome
    from llmc.runtime.startup.warming import Warmed

REQUESTS = 500
"""Default number of random requests for a certificate."""
SHOWN = 8
"""Buckets that an error line names; the JSON has all."""


@dataclass(frozen=True, kw_only=True)
class WarmupCommand(CaptureFlags):
    """Run every bucket of a bundle twice: the first run opens its graph, the second replays it.

    This makes a device compile or load everything before traffic arrives. Every sampling kind, top logits and prefix
    copies run as well. -v prints a line for each bucket. An interrupt prints the results so far.

    With --certify, random requests of every kind then run through the engine, and compilation monitors must see no
    compilation (docs/guarantees.md). Otherwise the command names what was compiled and writes no certificate.

    The largest bucket runs first, or with --traffic the most used one. If one executable takes any shape, only one
    prefill and one decode step run. A bundle that embeds or scores runs each bucket with one text. On the target
    device's own host, a portable bundle is completed first.

    A device that captures graphs is profiled first. The free memory is then divided between the KV cache and as many
    graphs as fit; buckets without a graph are named.

    Exit status 1: a bucket did not run (the rest still do), no graph fits, or something was compiled. Exit status 4: a
    request's answer differs when it runs alone.

    \b
    Example:
      llmc warmup bundle
      llmc warmup bundle --certify bundle.certificate.json --requests 1000 --sign release
      llmc warmup bundle --traffic requests.csv --json
      llmc warmup bundle -v
      llmc warmup bge-bundle --threads 2
      llmc warmup bundle --gpu-memory-utilization 0.9 --graph-reserved-mem 0.4 --graph-prompt-ratio 0.5
    """

    bundle: str = bundle_argument()
    traffic: str | None = order_flag()
    compile_first: bool = switch(
        "--compile/--no-compile", "First complete portable executables on their device's own host.", default=True
    )
    enforce_eager: bool = eager_flag()
    threads: int | None = threads_flag()
    weights: str | None = weights_flag()
    certify: Path | None = flag(None, "OUT.json", "Then run random requests and certify that nothing was compiled.")
    requests: int | None = flag(None, "N", f"Random requests for the certificate. Default: {REQUESTS}.", min=1)
    seed: int | None = flag(None, "S", "Seed of the random requests. Default: 0.", min=0)
    sign: Path | None = flag(None, "PRIVATE", "Private key that signs the certificate. Default: LLMC_SIGNING_KEY.")
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print the result as JSON.")

    def run(self) -> None:
        from llmc.artifacts.local.opening import open_store
        from llmc.artifacts.local.references import resolve
        from llmc.runtime.bundle import Bundle
        from llmc.runtime.startup.opening import EngineOptions

        requested = list(self.values("requests", "seed", "sign"))
        if requested and self.certify is None:
            raise InputError(f"--{requested[0]} needs a certificate: name its file with --certify OUT.json")
        settings = Settings.from_environment()
        store = open_store(self.cache_dir, settings)
        folder = resolve(self.bundle, settings, store)
        if (opened := Bundle.open(folder)).task != "generate":
            given = [f"--{name}" for name in self.values("traffic", "weights", "certify")]
            given += ["--enforce-eager"] * self.enforce_eager + list(self.choice(settings).flags)
            if given:
                raise InputError(f"{given[0]} is for models that generate; leave it out for a bundle to {opened.task}")
            found = _warmed(opened, EngineOptions(self.threads), self.as_json and not sys.stderr.isatty())
            _shown(found, self.bundle, opened, self.as_json)
            return
        if self.weights is not None:
            from llmc.compiler.pipeline.bind import bound

            opened = Bundle.open(bound(folder, self.weights, store))
        if self.compile_first:
            opened = on_target_first(opened, store, settings, self.as_json)
        choice = self.choice(settings)
        uses = None if self.traffic is None else uses_in(self.traffic)(opened.plan)
        options = EngineOptions(self.threads, enforce_eager=self.enforce_eager)
        hidden = messages.verbose or (self.as_json and not sys.stderr.isatty())
        if self.certify is not None:
            from llmc.runtime.certificate.certifying import CertifyOptions

            wanted = CertifyOptions(self.requests or REQUESTS, self.seed or 0, uses, choice)
            certify_bundle(self.bundle, opened, self.certify, self.sign, options, wanted, self.as_json, hidden)
            return
        _shown(_warmed(opened, options, hidden, uses, choice), self.bundle, opened, self.as_json)


def _shown(found: WarmUpOutcome, bundle: str, opened: Bundle, as_json: bool) -> None:
    """Raises LlmcError naming what did not run."""
    if as_json:
        echo(json.dumps({"bundle": bundle, "device": opened.manifest.device, **found.to_dict()}))
    else:
        echo(_text(found, bundle, opened.manifest.device))
    if found.failed or found.failed_auxiliary:
        raise LlmcError(f"{bundle}: {_failures(found)}")
    if found.capturing is not None and found.capturing.failure and not found.interrupted:
        raise LlmcError(f"{bundle}: {found.capturing.failure}")
    if found.interrupted:
        echo(f"llmc: not warmed up: {len(found.missing)} of {len(found.warming.buckets)} buckets", err=True)
        raise typer.Exit(EXIT)


def _warmed(
    bundle: Bundle, options: EngineOptions, hidden: bool, uses: Mapping[Bucket, int] | None = None,
    choice: CaptureChoice | None = None,
) -> WarmUpOutcome:  # fmt: skip
    from llmc.api.measuring import warm_up

    with sigterm_interrupts(), messages.StepProgress("warm up", hidden) as bar:
        return warm_up(
            bundle, options, uses=uses, choice=choice,
            report=lambda found, ran, done, total: bar(_line(ran, found), done, total),
        )  # fmt: skip


def _line(ran: Warmed | Bucket | AuxiliaryRun, found: WarmUpOutcome) -> str:
    if isinstance(ran, Bucket):
        return f"{ran}: captured"
    from llmc.runtime.startup.warming import Warmed

    name = found.name(ran.bucket) if isinstance(ran, Warmed) else ran.name
    return f"{name}: " + (f"{ran.seconds:.3f} s" if ran.error is None else f"failed: {ran.error}")


def _text(found: WarmUpOutcome, bundle: str, device: str) -> str:
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
    if found.auxiliary:
        seconds = sum(ran.seconds for ran in found.auxiliary)
        lines.append(f"also run: {len(found.auxiliary)} kinds of sampling, top logits and moves in {seconds:.3f} s")
    lines.append(f"compilations: {counted.count}{opened}")
    if found.executor.capabilities.exact:
        runs = "one prefill and one decode step warm" if len(found.names) > 1 else "a text of each length warms"
        lines.insert(1, f"any shape runs as it is: {runs} it up")
    before, after = found.memory
    if before is not None and after is not None:
        location = "host" if found.capturing is None else "device"
        lines.append(f"free {location} memory: {size_text(before)} before, {size_text(after)} after")
    if found.capturing is not None:
        lines += ["", *found.capturing.report(None if messages.verbose else UNCAPTURED_SHOWN)]
    return "\n".join(lines)


def _failures(found: WarmUpOutcome) -> str:
    named: dict[str, Exception] = {found.name(bucket): error for bucket, error in found.failed.items()}
    kind = "of its buckets" if named else "of its other warm-up steps"
    named = named or found.failed_auxiliary
    some = "; ".join(f"{name}: {type(e).__name__}: {e}" for name, e in list(named.items())[:SHOWN])
    more = f"; and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
    return f"{len(named)} {kind} {'does' if len(named) == 1 else 'do'} not run here: {some}{more}"
