"""`llmc verify`: a bundle's files, and its numbers against the reference model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from llmc.cli.options import BundleArgument, StoreFlag, option
from llmc.cli.output import echo
from llmc.errors import InputError


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("verify")(verify)


def verify(
    bundle: BundleArgument,
    *,
    reference: Annotated[
        str | None, option("--reference", "MODEL", "The checkpoint. Default: the one it was compiled from.")
    ] = None,
    certificate: Annotated[
        Path | None, option("--certificate", "CERT.json", "Check this certificate of it instead, and run nothing.")
    ] = None,
    allow_unsigned: Annotated[
        bool, typer.Option("--allow-unsigned", help="Believe a certificate that no trusted key signed.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Every bucket under two poisons, not a sample of them.")] = False,
    cache_dir: StoreFlag = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Check every file of a bundle, then run each executable against the reference model with padding poisoned.

    Of a TPU's executables, which are compiled for this CPU first, those of sampled buckets are run; --all runs all.

    Accuracy is how far its predictions diverge from the reference's over a text that comes with llmc. A bundle of a
    configuration alone is bound to the weights of --reference first. Where the outcome that a bundle records came from
    elsewhere, a line says so, and whether a trusted key signed it; that it was verified here is remembered.

    With --certificate, a certificate of `llmc warmup --certify` is checked: signed by a trusted key, of this bundle,
    complete, of this device and toolchain, and that nothing was compiled.

    Exits 4 when the numbers disagree or a certificate certifies nothing, 5 when a file is missing, damaged, untrusted
    or of something else.

    \b
    Example:
      llmc verify bundle
      llmc verify bundle --certificate bundle.certificate.json
      llmc verify bundle --reference ./SmolLM2-135M-Instruct --all --json
    """
    from llmc.artifacts.bundle.manifest import read_manifest
    from llmc.artifacts.local.opening import open_store
    from llmc.artifacts.local.origins import Origin, origin_words
    from llmc.artifacts.local.references import resolve
    from llmc.cli.accuracy import accuracy_line, verified_line
    from llmc.cli.output import CompileProgress
    from llmc.compiler.pipeline.bind import bound
    from llmc.compiler.pipeline.compile import VerifyReport
    from llmc.compiler.pipeline.reverify import verify_again
    from llmc.settings import Settings

    settings = Settings.from_environment()
    folder = resolve(bundle, settings, open_store(cache_dir, settings))
    if certificate is not None:
        if reference is not None or every:
            raise InputError("--certificate runs nothing: leave out --reference and --all")
        from llmc.cli.certifying import check_certificate
        from llmc.runtime.bundle import Bundle

        check_certificate(bundle, Bundle.open(folder), certificate, allow_unsigned, as_json)
        return
    store = open_store(cache_dir, settings, read_manifest(folder).device)
    with CompileProgress(hidden=as_json and not sys.stderr.isatty()) as progress:
        if read_manifest(folder).is_unbound:
            folder = bound(folder, _weights(bundle, reference), store, progress)
        found = verify_again(folder, reference, every, store, progress, lambda d, t: progress(VerifyReport(d, t)))
    if as_json:
        echo(json.dumps(found))
        return
    manifest = read_manifest(folder)
    echo(f"{bundle}: files intact; {verified_line(found, len(manifest.executables))}")
    if (accuracy := accuracy_line(found)) is not None:
        echo(accuracy)
    recorded = Origin(found["recorded"]["origin"], tuple(found["recorded"]["signers"]))
    if recorded.name in ("signed", "unsigned"):
        echo(f"the outcome it records: {origin_words(recorded, manifest.verification)}; verified again here")


def _weights(bundle: str, reference: str | None) -> str:
    if reference is None:
        raise InputError(f"{bundle} was compiled from a configuration alone: name its weights with --reference MODEL")
    return reference
