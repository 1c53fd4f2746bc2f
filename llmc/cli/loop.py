"""`llmc loop`: a server's bundle follows its traffic."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmc.cli.interrupts import sigterm_interrupts
from llmc.cli.options import Command, argument, flag, store_flag, switch
from llmc.cli.output import CompileProgress, echo
from llmc.cli.quantities import duration, fraction
from llmc.errors import InputError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.loop import Round


@dataclass(frozen=True, kw_only=True)
class LoopCommand(Command):
    """Evaluate the running plan on recent traffic, plan anew, compile what the store lacks, and swap it in.

    The server keeps what it serves unless it took the new bundle. An interrupted round leaves what it compiled in the
    store, and the next one goes on. The token is LLMC_ADMIN_TOKEN, here and where the server starts.

    \b
    Example:
      llmc loop http://127.0.0.1:8000 --every 1h --budget 20m --min-gain 10%
      llmc loop http://127.0.0.1:8000 --traffic traffic.jsonl --once --dry-run
      llmc loop --bundle bundle --traffic traffic.jsonl --once
    """

    server: str | None = argument("[SERVER]", "URL of llmc serve with an admin token.", default=None)
    traffic: str | None = flag(
        None, "FILE", "A recording. Default: the server's /metrics, what came since the last round."
    )
    bundle: str | None = flag(None, "BUNDLE", "Without SERVER: what is re-planned first. Default: DIR/current.")
    output: Path = flag(
        Path("loop.llmc"),
        "DIR",
        "Bundles, the link current to the newest, and the log loop.jsonl.",
        names="--output -o",
    )
    every: str = flag("1h", "T", "From the beginning of a round to the next.")
    once: bool = switch("--once", "One round, now.")
    budget: str | None = flag(None, "T", "Compile time of a round. Default: any.")
    min_gain: str = flag("5%", "F", "Padded tokens of a phase that a new plan has to save; below, nothing is done.")
    max_graphs: int | None = flag(None, "N", "Buckets of a plan. Default: as many as now.", min=1)
    model: str | None = flag(None, "MODEL", "The checkpoint. Default: where the bundle was compiled from.")
    dry_run: bool = switch("--dry-run", "Say what a round would do, and stop.")
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print a JSON line a round.")

    def run(self) -> None:
        from llmc.artifacts.local.opening import open_store
        from llmc.loop import AdminClient, LoopFolder, LoopOptions, run_round

        settings = Settings.from_environment()
        if self.server is not None and self.bundle is not None:
            raise InputError(
                "--bundle names what no server serves; leave it out with SERVER, which says what it serves"
            )
        if self.server is None and self.traffic is None:
            raise InputError("name the SERVER, or a recording of its traffic: --traffic FILE")
        if self.server is not None and not self.server.startswith(("http://", "https://")):
            raise InputError(f"SERVER {self.server!r} is no URL; give one like http://127.0.0.1:8000")
        if self.server is not None and settings.admin_token is None:
            raise InputError("LLMC_ADMIN_TOKEN is not set; start llmc serve and llmc loop with the same one")
        period = duration("--every", self.every) or 0
        if period <= 0:
            raise InputError(f"--every {self.every} must be above 0; --once runs one round")
        client = None if self.server is None else AdminClient(self.server, settings.admin_token or "")
        requested = LoopOptions(
            LoopFolder(self.output), client, self.bundle, self.traffic, duration("--budget", self.budget),
            fraction("--min-gain", self.min_gain) or 0, self.max_graphs, self.model, self.dry_run,
        )  # fmt: skip
        store = open_store(self.cache_dir, settings)
        code = 0
        with sigterm_interrupts(), requested.folder.held():
            while True:
                began = time.monotonic()
                with CompileProgress(self.as_json and not sys.stderr.isatty()) as progress:
                    done = run_round(requested, store, settings, progress)
                requested = replace(requested, bundle=None) if done.outcome == "ready" else requested
                echo(json.dumps(done.to_dict()) if self.as_json else said(done))
                code = 1 if done.outcome in ("failed", "refused") else 0
                if self.once or self.dry_run:
                    break
                time.sleep(max(0.0, began + period - time.monotonic()))
        raise typer.Exit(code)


def said(done: Round) -> str:
    """What a round did, in a line."""
    parts = [f"{done.requests} requests"]
    if done.gain:
        saved = ", ".join(f"{phase} {gain:+.1%}" for phase, gain in done.gain.items())
        parts.append(f"a plan of {done.graphs} buckets saves of padded tokens: {saved}")
    if done.compile_s is not None:
        parts.append(f"{done.built} executables built and {done.reused} reused in {done.compile_s:.1f} s")
    elif done.estimated_s is not None:
        parts.append(f"compiling takes about {done.estimated_s:.0f} s, {done.reused} executables are there")
    if done.outcome in ("swapped", "ready"):
        parts.append(f"{done.bundle} {'is served' if done.outcome == 'swapped' else 'is ready'}")
    what = {
        "nothing": "nothing done", "planned": "dry run", "refused": "the server keeps its bundle",
        "stopped": "stopped while compiling", "failed": f"failed to {done.stage}",
    }  # fmt: skip
    end = what.get(done.outcome, "")
    return "; ".join(parts) + (f"; {end}" if end else "") + (f": {done.why}" if done.why else "")
