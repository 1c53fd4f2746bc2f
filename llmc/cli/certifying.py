"""`llmc warmup --certify`, and `llmc verify --certificate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.cli import output as messages
from llmc.cli.interrupts import EXIT, sigterm_interrupts
from llmc.cli.output import echo
from llmc.errors import InputError, LlmcError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.signing.signer import Signer
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.certificate.certifying import CertifyOptions
    from llmc.runtime.certificate.document import Certificate
    from llmc.runtime.startup.opening import EngineOptions

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
        self._bar: messages.StepProgress | None = None
        self._done = 0

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)

    def __call__(self, stage: str, text: str, done: int, total: int) -> None:
        if stage != self._stage:
            self.__exit__(None, None, None)
            self._bar = messages.StepProgress(stage, self._hidden).__enter__()
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
