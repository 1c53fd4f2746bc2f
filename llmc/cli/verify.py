"""`llmc verify`: check a bundle's files, its outputs against the reference model, or its certificate; and certify."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.cli.options import Command, bundle_argument, flag, store_flag, switch
from llmc.cli.output import EXIT, CompileProgress, StepProgress, echo, sigterm_interrupts
from llmc.cli.results import accuracy_line, verified_line
from llmc.errors import InputError, LlmcError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.signing.signer import Signer
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.certificate.certifying import CertifyOptions
    from llmc.runtime.certificate.document import Certificate
    from llmc.runtime.startup.opening import EngineOptions


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


PARTS, LINES = 500, 10
"""Progress updates: steps of a bar, and lines if stderr is not a terminal."""


def certify_bundle(
    name: str, bundle: Bundle, file: Path, key: Path | None, options: EngineOptions, wanted: CertifyOptions,
    as_json: bool, hidden: bool,
) -> None:  # fmt: skip
    """Certify a bundle and write the certificate to `file`, which stays unchanged if anything fails."""
    from llmc.runtime.certificate.certifying import Certifying
    from llmc.runtime.certificate.document import write_file

    if not file.parent.is_dir():
        raise InputError(f"{file}: the folder {file.parent} for the certificate does not exist")
    signer = _signer(key)
    try:
        with sigterm_interrupts(), _Bars(hidden) as bars:
            built = Certifying(bundle, options, wanted, bars).run()
    except KeyboardInterrupt:
        echo(f"llmc: not certified: {name}; nothing was written to {file}", err=True)
        raise typer.Exit(EXIT) from None
    except LlmcError as error:
        raise type(error)(f"{name}: {error}") from error
    write_file(file, built, signer)
    if as_json:
        echo(json.dumps({"bundle": name, "file": str(file), "signed": signer is not None, **built.to_dict()}))
    else:
        echo(f"{name} on {built.device}")
        for line in certificate_lines(built):
            echo(line)
        by = "not signed" if signer is None else f"signed by key {signer.public.short}"
        echo(f"{file}: {by}")


def _signer(key: Path | None) -> Signer | None:
    from llmc.cli.cache.signing import signer_of

    return None if key is None and Settings.from_environment().signing_key is None else signer_of(key)


def certificate_lines(built: Certificate) -> list[str]:
    """Describe a certificate in words."""
    seconds, requests = built.seconds, built.requests
    ran = sum(bool(b.replays + b.steps) for b in built.buckets)
    by_requests = sum(bool(b.steps) for b in built.buckets)
    shapes = (
        f"any shape runs as it is: {sum(bool(e.replays + e.steps) for e in built.executables)} of "
        f"{len(built.executables)} executables ran"
        if built.any_shape
        else f"{ran} of {len(built.buckets)} buckets replayed, {by_requests} of them by requests"
    )
    if built.graphs is not None:
        shapes += f", {built.graphs} from captured graphs"
    lines = [
        f"warm up {seconds.get('warm up', 0.0):.1f} s, then {requests.count} random requests in "
        f"{seconds.get('requests', 0.0):.1f} s: {requests.answer_tokens} tokens, prompts of up to "
        f"{requests.longest_prompt}, {len(requests.kinds)} kinds of sampling",
        shapes,
        f"compilations: {built.compilations} once it was ready",
    ]
    for monitor in built.monitors:
        after = "unknown" if monitor.after is None else str(monitor.after)
        blind = f" (blind: {monitor.blind})" if monitor.blind else ""
        before = "unknown" if monitor.before is None else str(monitor.before)
        lines.append(f"  {monitor.monitor}: {before} before, {after} after{blind}")
    return lines


class _Bars:
    def __init__(self, hidden: bool) -> None:
        self._hidden = hidden
        self._stage = ""
        self._bar: StepProgress | None = None
        self._done = 0

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)

    def __call__(self, stage: str, text: str, done: int, total: int) -> None:
        if stage != self._stage:
            self.__exit__(None, None, None)
            self._bar = StepProgress(stage, self._hidden).__enter__()
            self._stage, self._done = stage, 0
        parts = PARTS if sys.stderr.isatty() else LINES
        if done * parts // total != self._done * parts // total and self._bar is not None:
            self._done = done
            self._bar(text, done, total)


def check_certificate(name: str, bundle: Bundle, file: Path, allow_unsigned: bool, as_json: bool) -> None:
    """Print whether a certificate is valid and what it says. Raises what `check` raises."""
    from llmc.artifacts.signing.keyring import Keyring
    from llmc.runtime.certificate.checking import check

    settings = bundle.settings
    allow = allow_unsigned or settings.allow_unsigned
    found = check(file, bundle, Keyring.from_settings(settings, allow_unsigned), allow)
    if as_json:
        echo(json.dumps({"file": str(file), **found.to_dict()}))
        return
    by = "not signed" if found.signer is None else f"signed by {found.signer[0]} ({found.signer[1][:16]})"
    echo(f"{file}: valid for {name}, {by}, created {found.certificate.created}")
    for line in certificate_lines(found.certificate):
        echo(line)
