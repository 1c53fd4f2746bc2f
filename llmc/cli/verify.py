"""`llmc verify`: check a bundle's files, and its outputs against the reference model."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from llmc.cli.certifying import check_certificate
from llmc.cli.options import Command, bundle_argument, flag, store_flag, switch
from llmc.cli.output import CompileProgress, echo
from llmc.cli.results import accuracy_line, verified_line
from llmc.errors import InputError
from llmc.settings import Settings


@dataclass(frozen=True, kw_only=True)
class VerifyCommand(Command):
    """Check a bundle: compare every file with its digest, then run every executable against the reference model.

    Padding is filled with NaN, so that a result that depends on it is found. The report also gives the accuracy: how
    far predictions diverge from the reference over a text that comes with llmc. Executables for a TPU are first
    compiled for this CPU; only sampled buckets run unless --all is given.

    If the recorded verification comes from another host, a line says so and whether a trusted key signed it. A bundle
    compiled with --config takes its weights from --reference.

    With --certificate, nothing runs. A certificate of llmc warmup --certify is checked: its signature, that it is
    complete and of this bundle, device and toolchain, and that nothing was compiled.

    Exit status 4: outputs differ, or the certificate certifies nothing. Exit status 5: a file is missing, damaged,
    untrusted or of something else.

    \b
    Example:
      llmc verify bundle
      llmc verify bundle --certificate bundle.certificate.json
      llmc verify bundle --reference ./SmolLM2-135M-Instruct --all --json
    """

    bundle: str = bundle_argument()
    reference: str | None = flag(None, "MODEL", "The reference checkpoint. Default: the one it was compiled from.")
    certificate: Path | None = flag(None, "CERT.json", "Check this certificate instead; nothing runs.")
    allow_unsigned: bool = switch("--allow-unsigned", "Accept a certificate that no trusted key signed.")
    every: bool = switch("--all", "Run every bucket with two NaN fills, not only sampled ones.")
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print the result as JSON.")

    def run(self) -> None:
        from llmc.artifacts.bundle.manifest import read_manifest
        from llmc.artifacts.local.opening import open_store
        from llmc.artifacts.local.origins import Origin, origin_words
        from llmc.artifacts.local.references import resolve
        from llmc.compiler.pipeline.bind import bound
        from llmc.compiler.pipeline.compile import VerifyReport
        from llmc.compiler.pipeline.reverify import verify_again

        settings = Settings.from_environment()
        folder = resolve(self.bundle, settings, open_store(self.cache_dir, settings))
        if self.certificate is not None:
            if self.reference is not None or self.every:
                raise InputError("--certificate runs nothing: leave out --reference and --all")
            from llmc.runtime.bundle import Bundle

            check_certificate(self.bundle, Bundle.open(folder), self.certificate, self.allow_unsigned, self.as_json)
            return
        manifest = read_manifest(folder)
        store = open_store(self.cache_dir, settings, manifest.device)
        with CompileProgress(hidden=self.as_json and not sys.stderr.isatty()) as progress:
            if manifest.is_unbound:
                folder = bound(folder, _weights(self.bundle, self.reference), store, progress)
                manifest = read_manifest(folder)
            found = verify_again(
                folder, self.reference, self.every, store, progress, lambda d, t: progress(VerifyReport(d, t))
            )
        if self.as_json:
            echo(json.dumps(found))
            return
        echo(f"{self.bundle}: files intact; {verified_line(found, len(manifest.executables))}")
        if (accuracy := accuracy_line(found)) is not None:
            echo(accuracy)
        recorded = Origin(found["recorded"]["origin"], tuple(found["recorded"]["signers"]))
        if recorded.name in ("signed", "unsigned"):
            echo(f"recorded verification: {origin_words(recorded, manifest.verification)}; verified again here")


def _weights(bundle: str, reference: str | None) -> str:
    if reference is None:
        raise InputError(f"{bundle} was compiled from a configuration alone: name its weights with --reference MODEL")
    return reference
