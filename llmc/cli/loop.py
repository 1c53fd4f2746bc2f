"""`llmc loop`: keep a server's bundle fitted to its traffic."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmc.buckets.render.text import counted
from llmc.cli.options import Command, argument, duration, flag, fraction, store_flag, switch
from llmc.cli.output import CompileProgress, echo, sigterm_interrupts
from llmc.errors import InputError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.loop import Round


@dataclass(frozen=True, kw_only=True)
class LoopCommand(Command):
    """Keep a server's bundle fitted to its traffic: re-plan for recent requests, compile what is new, swap the bundle
    in.

    Each round evaluates the running plan and stops there if a new plan saves too little (--min-gain). The server keeps
    its bundle until it accepts the new one. After an interrupt, the next round continues from the store. Set
    LLMC_ADMIN_TOKEN to the same value here and for llmc serve.

    \b
    Example:
      llmc loop http://127.0.0.1:8000 --every 1h --budget 20m --min-gain 10%
      llmc loop http://127.0.0.1:8000 --traffic traffic.jsonl --once --dry-run
      llmc loop --bundle bundle --traffic traffic.jsonl --once
    """

    server: str | None = argument("[SERVER]", "URL of an llmc serve that has an admin token.", default=None)
    traffic: str | None = flag(None, "FILE", "Recorded requests. Default: the server's /metrics since the last round.")
    bundle: str | None = flag(None, "BUNDLE", "Without SERVER: the bundle to start from. Default: DIR/current.")
    output: Path = flag(
        Path("loop.llmc"),
        "DIR",
        "Folder for bundles, the link current to the newest, and the log loop.jsonl.",
        names="--output -o",
    )
    every: str = flag("1h", "T", "Time between round starts.")
    once: bool = switch("--once", "Run one round, then exit.")
    budget: str | None = flag(None, "T", "Most compile time per round. Default: no limit.")
    min_gain: str = flag("5%", "F", "Least share of a phase's padded tokens that a new plan must save.")
    max_graphs: int | None = flag(None, "N", "Most buckets in a plan. Default: as many as now.", min=1)
    model: str | None = flag(None, "MODEL", "The checkpoint. Default: the one the bundle was compiled from.")
    dry_run: bool = switch("--dry-run", "Print what a round would do, then stop.")
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print one JSON line per round.")

    def run(self) -> None:
        from llmc.artifacts.local.opening import open_store
        from llmc.loop import AdminClient, LoopFolder, LoopOptions, run_round

        settings = Settings.from_environment()
        if self.server is not None and self.bundle is not None:
            raise InputError(
                "--bundle cannot be combined with SERVER, which reports its own bundle; leave out one of them"
            )
        if self.server is None and self.traffic is None:
            raise InputError("name the SERVER, or a recording of its traffic: --traffic FILE")
        if self.server is not None and not self.server.startswith(("http://", "https://")):
            raise InputError(f"SERVER {self.server!r} is not a URL; give one like http://127.0.0.1:8000")
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
    """Summarise a round in one line."""
    parts = [counted(done.requests, "request")]
    if done.gain:
        saved = ", ".join(f"{phase} {gain:+.1%}" for phase, gain in done.gain.items())
        parts.append(f"a plan of {counted(done.graphs, 'bucket')} saves of padded tokens: {saved}")
    if done.compile_s is not None:
        parts.append(f"{counted(done.built, 'executable')} built and {done.reused} reused in {done.compile_s:.1f} s")
    elif done.estimated_s is not None:
        stored = counted(done.reused, "executable")
        parts.append(f"compiling takes about {done.estimated_s:.0f} s, {stored} in the store")
    if done.outcome in ("swapped", "ready"):
        parts.append(f"{done.bundle} {'is served' if done.outcome == 'swapped' else 'is ready'}")
    what = {
        "nothing": "nothing done", "planned": "dry run", "refused": "the server keeps its bundle",
        "stopped": "stopped while compiling", "failed": f"failed to {done.stage}",
    }  # fmt: skip
    end = what.get(done.outcome, "")
    return "; ".join(parts) + (f"; {end}" if end else "") + (f": {done.why}" if done.why else "")
