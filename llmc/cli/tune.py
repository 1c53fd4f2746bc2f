"""`llmc tune`: time kernels for a bundle's matmuls on the target device's own host."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmc.buckets.render.text import counted
from llmc.cli import output as messages
from llmc.cli.options import Command, bundle_argument, device_flag, flag, store_flag, switch
from llmc.cli.output import EXIT, echo, sigterm_interrupts
from llmc.errors import InputError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.compiler.pipeline.tune import TuneResult


@dataclass(frozen=True, kw_only=True)
class TuneCommand(Command):
    """Find the fastest matmul kernels for a bundle on a host with its GPU, so that other hosts can compile with them.

    A compile without the GPU cannot time kernels. This command compiles each graph's portable program on the GPU, which
    times every candidate, and keeps the fastest in the store and in -o FILE. llmc compile --tuning FILE (or --tuning
    auto, from the store) then uses them on any host. After an interrupt, run it again with the same FILE to continue.

    \b
    Example:
      llmc tune bundle --device cuda:h100 -o h100.tuning.json
      llmc compile MODEL --device cuda:h100 --tuning h100.tuning.json -o tuned
    """

    bundle: str = bundle_argument()
    device: str | None = device_flag(None, "Refuse a bundle for any device but this one, such as cuda:h100.")
    output: Path | None = flag(
        None, "FILE", "Also write the results here; an existing file is extended.", names="-o --output"
    )
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print the result as JSON.")

    def run(self) -> None:
        from llmc.artifacts.local.opening import open_store
        from llmc.artifacts.local.references import resolve
        from llmc.compiler.pipeline.tune import tune_bundle
        from llmc.runtime.bundle import Bundle

        settings = Settings.from_environment()
        store = open_store(self.cache_dir, settings)
        opened = Bundle.open(resolve(self.bundle, settings, store), settings)
        if self.device is not None and self.device != opened.manifest.device:
            raise InputError(f"{self.bundle} is a bundle for device {opened.manifest.device}, not {self.device}")
        hidden = self.as_json and not sys.stderr.isatty()
        with sigterm_interrupts(), messages.StepProgress("tune", hidden) as reported:
            result = tune_bundle(opened, store, self.output, reported)
        echo(json.dumps(result.to_json()) if self.as_json else _text(result))
        if result.interrupted:
            done = f"{result.tuned} of {result.executables} executables were tuned"
            echo(f"llmc: {done}; their results are kept", err=True)
            raise typer.Exit(EXIT)


def _text(result: TuneResult) -> str:
    gpu = result.built_for.get("gpu", result.device)
    where = f"; in {result.file}" if result.file and result.results else ""
    return (
        f"{result.bundle}: {result.results} matmuls tuned on {gpu}, {result.new} of them new; {result.tuned} of "
        f"{counted(result.executables, 'executable')}; {result.seconds:.1f} s{where}"
    )
