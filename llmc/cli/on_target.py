"""On-target compilation of a portable bundle, shared by `llmc compile --resume` and `llmc warmup`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.buckets.render.text import counted
from llmc.cli import output as console
from llmc.cli.output import echo
from llmc.cli.results import on_target_lines
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.pipeline.on_target import OnTargetResult
    from llmc.runtime.bundle import Bundle


def on_target_instead(output: Path | None, cache_dir: Path | None, options: CompileOptions, as_json: bool) -> bool:
    """Complete the portable bundle `output` and print the result. Raises what `compile_on_target` raises.

    Returns False, and does nothing, if there is no bundle to complete or an interrupted compile of it to continue.
    """
    from llmc.artifacts.local.opening import open_store
    from llmc.compiler.pipeline.on_target import can_compile_on_target

    if output is None or not can_compile_on_target(output):
        return False
    settings = Settings.from_environment()
    result = compile_portable(output, open_store(cache_dir, settings), settings, options.jobs, options.verify, as_json)
    if as_json:
        echo(json.dumps(result.to_json()))
        return True
    echo(
        f"{result.bundle}: {counted(result.native + result.portable, 'executable')}; native {result.native}, portable "
        f"{result.portable}; {result.bytes / 1e6:,.1f} MB; {result.seconds:.1f} s"
    )
    for line in on_target_lines(result.to_json()):
        echo(line)
    return True


def compile_portable(
    output: Path, store: Store, settings: Settings, jobs: int, verify: str, as_json: bool
) -> OnTargetResult:  # fmt: skip
    """Complete the bundle in place, with progress on stderr. Raises what `compile_on_target` raises."""
    from llmc.compiler.pipeline.on_target import compile_on_target

    console.going_on = f"; finished work is kept: continue with `llmc compile --resume -o {output}`"
    with console.CompileProgress(as_json and not sys.stderr.isatty()) as progress:
        return compile_on_target(output, store, progress, jobs=jobs, verify=verify, settings=settings)


def on_target_first(bundle: Bundle, store: Store, settings: Settings, as_json: bool) -> Bundle:
    """The bundle, completed on this host if it can be and still has to be. The result is printed on stderr.

    A bundle inside a store is left alone, because its name there is the digest of its content.
    """
    from llmc.artifacts.bundle.reader import IN_STORE
    from llmc.compiler.pipeline.on_target import on_target_here, unfinished
    from llmc.compiler.pipeline.resolve import target_of
    from llmc.runtime.bundle import Bundle

    if settings.open_portable or not unfinished(bundle) or on_target_here(target_of(bundle.manifest)) is None:
        return bundle
    if bundle.path.resolve().parent.name == IN_STORE:
        echo(f"llmc: {bundle.path} is inside a store, so its portable executables are not compiled: write it to a "
              f"folder with llmc cache pull REFERENCE -o FOLDER, and use that", err=True)  # fmt: skip
        return bundle
    result = compile_portable(bundle.path, store, settings, settings.threads, "sample", as_json)
    if not console.quiet:
        echo("\n".join(on_target_lines(result.to_json())), err=True)
    return Bundle.open(bundle.path, settings)
