"""`llmc.certify`: the Python form of `llmc warmup --certify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.runtime.certificate.certifying import OnStage
    from llmc.runtime.certificate.document import Certificate


def certify(
    bundle: str | Path,
    output: str | Path | None = None,
    *,
    requests: int = 500,
    seed: int = 0,
    sign: str | Path | None = None,
    threads: int | None = None,
    weights: str | Path | None = None,
    report: OnStage | None = None,
) -> Certificate:
    """Warm a bundle up, run random requests of every kind, and certify that nothing was compiled meanwhile.

    The certificate is written to `output` and signed with the private key file `sign`, or not signed if None. `weights`
    is the checkpoint for a bundle compiled without weights. `report` is called with the stage, a text, and how much of
    how much is done. Compilations of any thread in this process count, so run nothing else in it.

    Raises CompiledError if something was compiled, LlmcError if a bucket does not run, VerificationError if a request
    fails, InputError for an unusable key, and what opening the bundle raises. In these cases nothing is written.
    """
    from llmc.api import bundle_of
    from llmc.artifacts.signing.signer import Signer
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.certificate.certifying import Certifying, CertifyOptions
    from llmc.runtime.certificate.document import write_file
    from llmc.runtime.startup.opening import EngineOptions
    from llmc.settings import Settings

    signer = None if sign is None else Signer.load(sign, Settings.from_environment().signing_passphrase)
    opened = Bundle.open(bundle_of(str(bundle), weights=None if weights is None else str(weights)))
    run = Certifying(opened, EngineOptions(threads), CertifyOptions(requests, seed), report or (lambda *_: None))
    built = run.run()
    if output is not None:
        write_file(Path(output), built, signer)
    return built
