"""`llmc tune`: time kernels for a bundle's products on its device's own host."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmc.cli import output as messages
from llmc.cli.interrupts import EXIT, sigterm_interrupts
from llmc.cli.options import Command, bundle_argument, device_flag, flag, store_flag, switch
from llmc.cli.output import echo
from llmc.errors import InputError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.compiler.pipeline.tune import TuneResult


@dataclass(frozen=True, kw_only=True)
class TuneCommand(Command):
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

    bundle: str = bundle_argument()
    device: str | None = device_flag(None, "Refuse a bundle of another device, such as cuda:h100.")
    output: Path | None = flag(
        None, "FILE", "Keep the results in this file, too; one that exists is added to.", names="-o --output"
    )
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print the outcome as JSON.")

    def run(self) -> None:
        from llmc.artifacts.local.opening import open_store
        from llmc.artifacts.local.references import resolve
        from llmc.compiler.pipeline.tune import tune_bundle
        from llmc.runtime.bundle import Bundle

        settings = Settings.from_environment()
        store = open_store(self.cache_dir, settings)
        opened = Bundle.open(resolve(self.bundle, settings, store), settings)
        if self.device is not None and self.device != opened.manifest.device:
            raise InputError(f"{self.bundle} is a bundle of device {opened.manifest.device}, not {self.device}")
        hidden = self.as_json and not sys.stderr.isatty()
        with sigterm_interrupts(), messages.StepProgress("tune", hidden) as reported:
            result = tune_bundle(opened, store, self.output, reported)
        echo(json.dumps(result.to_json()) if self.as_json else _text(result))
        if result.interrupted:
            done = f"{result.tuned} of {result.executables} executables were tuned"
            echo(f"llmc: {done}; what was found is kept", err=True)
            raise typer.Exit(EXIT)


def _text(result: TuneResult) -> str:
    card = result.built_for.get("card", result.device)
    where = f"; in {result.file}" if result.file and result.results else ""
    return (
        f"{result.bundle}: {result.results} products tuned on {card}, {result.new} of them new; {result.tuned} of "
        f"{result.executables} executables; {result.seconds:.1f} s{where}"
    )
