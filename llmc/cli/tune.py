"""`llmc tune`: time kernels for a bundle's products on its device's own host."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli import output as messages
from llmc.cli.interrupts import EXIT, sigterm_interrupts
from llmc.cli.options import BundleArgument, StoreFlag, device_option, option
from llmc.cli.output import echo
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.compiler.pipeline.tune import TuneResult


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("tune")(tune)


def tune(
    bundle: BundleArgument,
    *,
    device: Annotated[
        str | None, device_option("--device", "Refuse a bundle of another device, such as cuda:h100.")
    ] = None,
    output: Annotated[
        Path | None, option("-o --output", "FILE", "Keep the results in this file, too; one that exists is added to.")
    ] = None,
    cache_dir: StoreFlag = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Time kernels for the products of a bundle's graphs, on a host that has its device, for compiles elsewhere.

    A compile on a host without the card cannot time anything. This command can: it compiles each graph's portable
    program on the card, which times every candidate, and keeps the fastest in the store and in -o FILE. Then
    `llmc compile --tuning FILE` (or auto, from the store) takes them on any host. An interrupt keeps what was found;
    run it again with the same FILE to go on.

    \b
    Example:
      llmc tune bundle --device cuda:h100 -o h100.tuning.json
      llmc compile MODEL --device cuda:h100 --tuning h100.tuning.json -o tuned
    """
    from llmc.artifacts.local.opening import open_store
    from llmc.artifacts.local.references import resolve
    from llmc.compiler.pipeline.tune import tune_bundle
    from llmc.runtime.bundle import Bundle
    from llmc.settings import Settings

    settings = Settings.from_environment()
    store = open_store(cache_dir, settings)
    opened = Bundle.open(resolve(bundle, settings, store), settings)
    if device is not None and device != opened.manifest.device:
        raise InputError(f"{bundle} is a bundle of device {opened.manifest.device}, not {device}")
    hidden = as_json and not sys.stderr.isatty()
    with sigterm_interrupts(), messages.StepProgress("tune", hidden) as told:
        result = tune_bundle(opened, store, output, told)
    echo(json.dumps(result.to_json()) if as_json else _text(result))
    if result.interrupted:
        done = f"{result.tuned} of {result.executables} executables were tuned"
        echo(f"llmc: {done}; what was found is kept", err=True)
        raise typer.Exit(EXIT)


def _text(result: TuneResult) -> str:
    card = result.made_for.get("card", result.device)
    where = f"; in {result.file}" if result.file and result.results else ""
    return (
        f"{result.bundle}: {result.results} products tuned on {card}, {result.new} of them new; {result.tuned} of "
        f"{result.executables} executables; {result.seconds:.1f} s{where}"
    )
