"""Finishing a portable bundle on its device's host: what `llmc compile --resume` and `llmc warmup` share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.cli import output as console
from llmc.cli.output import echo
from llmc.cli.results import finished_lines
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.pipeline.finish import FinishResult
    from llmc.runtime.bundle import Bundle


def finish_instead(output: Path | None, cache_dir: Path | None, options: CompileOptions, as_json: bool) -> bool:
    """Finish the bundle `output` and print what that did, if there is one to finish and no compile of it to go on with;
    whether that was so. Raises what `finish_bundle` raises."""
    from llmc.artifacts.local.opening import open_store
    from llmc.compiler.pipeline.finish import is_finishable

    if output is None or not is_finishable(output):
        return False
    settings = Settings.from_environment()
    result = finish(output, open_store(cache_dir, settings), settings, options.jobs, options.verify, as_json)
    if as_json:
        echo(json.dumps(result.to_json()))
        return True
    echo(
        f"{result.bundle}: {result.native + result.portable} executables; native {result.native}, portable "
        f"{result.portable}; {result.bytes / 1e6:,.1f} MB; {result.seconds:.1f} s"
    )
    for line in finished_lines(result.to_json()):
        echo(line)
    return True


def finish(
    output: Path, store: Store, settings: Settings, jobs: int, verify: str, as_json: bool
) -> FinishResult:  # fmt: skip
    """Finish the bundle in place, with progress on stderr; raises what `finish_bundle` raises."""
    from llmc.compiler.pipeline.finish import finish_bundle

    console.going_on = f"; what is done is kept: go on with `llmc compile --resume -o {output}`"
    with console.CompileProgress(as_json and not sys.stderr.isatty()) as progress:
        return finish_bundle(output, store, progress, jobs=jobs, verify=verify, settings=settings)


def finish_first(bundle: Bundle, store: Store, settings: Settings, as_json: bool) -> Bundle:
    """The bundle, finished where this host can and has still to finish it; what that did is told on stderr.

    One that is used from inside a store stays as it is, since its name there is the digest of its content.
    """
    from llmc.artifacts.bundle.reader import IN_STORE
    from llmc.compiler.pipeline.finish import finisher_here, unfinished
    from llmc.compiler.pipeline.resolve import target_of
    from llmc.runtime.bundle import Bundle

    if settings.open_portable or not unfinished(bundle) or finisher_here(target_of(bundle.manifest)) is None:
        return bundle
    if bundle.path.resolve().parent.name == IN_STORE:
        echo(f"llmc: {bundle.path} is not finished, as it lies in a store: put it into a folder of its own with "
              f"llmc cache pull REFERENCE -o FOLDER, and finish that", err=True)  # fmt: skip
        return bundle
    result = finish(bundle.path, store, settings, settings.threads, "sample", as_json)
    if not console.quiet:
        echo("\n".join(finished_lines(result.to_json())), err=True)
    return Bundle.open(bundle.path, settings)
