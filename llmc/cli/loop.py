"""`llmc loop`: a server's bundle follows its traffic."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.grouped_help import GroupedCommand
from llmc.cli.options import StoreFlag, option
from llmc.cli.output import echo
from llmc.cli.quantities import duration, fraction
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.loop import Round


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("loop", cls=GroupedCommand)(loop_command)


def loop_command(
    server: Annotated[
        str | None,
        typer.Argument(metavar="[SERVER]", help="URL of llmc serve with an admin token.", show_default=False),
    ] = None,
    *,
    traffic: Annotated[
        str | None,
        option("--traffic", "FILE", "A recording. Default: the server's /metrics, what came since the last round."),
    ] = None,
    bundle: Annotated[
        str | None, option("--bundle", "BUNDLE", "Without SERVER: what is re-planned first. Default: DIR/current.")
    ] = None,
    output: Annotated[
        Path, option("--output -o", "DIR", "Bundles, the link current to the newest, and the log loop.jsonl.")
    ] = Path("loop.llmc"),
    every: Annotated[str, option("--every", "T", "From the beginning of a round to the next.")] = "1h",
    once: Annotated[bool, typer.Option("--once", help="One round, now.")] = False,
    budget: Annotated[str | None, option("--budget", "T", "Compile time of a round. Default: any.")] = None,
    min_gain: Annotated[
        str, option("--min-gain", "F", "Padded tokens of a phase that a new plan has to save; below, nothing is done.")
    ] = "5%",
    max_graphs: Annotated[
        int | None, option("--max-graphs", "N", "Buckets of a plan. Default: as many as now.", min=1)
    ] = None,
    model: Annotated[
        str | None, option("--model", "MODEL", "The checkpoint. Default: where the bundle was compiled from.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what a round would do, and stop.")] = False,
    cache_dir: StoreFlag = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line a round.")] = False,
) -> None:
    """Evaluate the running plan on recent traffic, plan anew, compile what the store lacks, and swap it in.

    The server keeps what it serves unless it took the new bundle. An interrupted round leaves what it compiled in the
    store, and the next one goes on. The token is LLMC_ADMIN_TOKEN, here and where the server starts.

    \b
    Example:
      llmc loop http://127.0.0.1:8000 --every 1h --budget 20m --min-gain 10%
      llmc loop http://127.0.0.1:8000 --traffic traffic.jsonl --once --dry-run
      llmc loop --bundle bundle --traffic traffic.jsonl --once
    """
    from llmc.artifacts.local.opening import open_store
    from llmc.cli.interrupts import sigterm_interrupts
    from llmc.cli.output import CompileProgress
    from llmc.loop import AdminClient, LoopFolder, LoopOptions, run_round
    from llmc.settings import Settings

    settings = Settings.from_environment()
    if server is not None and bundle is not None:
        raise InputError("--bundle names what no server serves; leave it out with SERVER, which says what it serves")
    if server is None and traffic is None:
        raise InputError("name the SERVER, or a recording of its traffic: --traffic FILE")
    if server is not None and not server.startswith(("http://", "https://")):
        raise InputError(f"SERVER {server!r} is no URL; give one like http://127.0.0.1:8000")
    if server is not None and settings.admin_token is None:
        raise InputError("LLMC_ADMIN_TOKEN is not set; start llmc serve and llmc loop with the same one")
    period = duration("--every", every) or 0
    if period <= 0:
        raise InputError(f"--every {every} must be above 0; --once runs one round")
    client = None if server is None else AdminClient(server, settings.admin_token or "")
    asked = LoopOptions(
        LoopFolder(output), client, bundle, traffic, duration("--budget", budget),
        fraction("--min-gain", min_gain) or 0, max_graphs, model, dry_run,
    )  # fmt: skip
    store = open_store(cache_dir, settings)
    code = 0
    with sigterm_interrupts(), asked.folder.held():
        while True:
            began = time.monotonic()
            with CompileProgress(as_json and not sys.stderr.isatty()) as progress:
                done = run_round(asked, store, settings, progress)
            asked = replace(asked, bundle=None) if done.outcome == "ready" else asked
            echo(json.dumps(done.to_dict()) if as_json else said(done))
            code = 1 if done.outcome in ("failed", "refused") else 0
            if once or dry_run:
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
