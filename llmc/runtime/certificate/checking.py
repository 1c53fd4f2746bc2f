"""Check a certificate: its signer, its bundle, this host, and its content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.errors import ArtifactError, VerificationError
from llmc.runtime.certificate.certifying import host, installed
from llmc.runtime.certificate.document import Certificate, read_file
from llmc.runtime.certificate.monitors import CacheFileMonitor, LateJaxMonitor, TorchMonitor
from llmc.runtime.executors import executor_class
from llmc.runtime.executors.compilations import CounterMonitor

if TYPE_CHECKING:
    from llmc.artifacts.signing.keyring import Keyring
    from llmc.runtime.bundle import Bundle

NEEDED = (
    CounterMonitor.name, CacheFileMonitor.name, TorchMonitor.name, LateJaxMonitor.name,
)  # fmt: skip
"""Monitors that every certificate must have; executors add more."""
SHOWN = 5


@dataclass(frozen=True)
class Checked:
    """A valid certificate, and the (name, id) of the trusted key that signed it, or None."""

    certificate: Certificate
    signer: tuple[str, str] | None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        built = self.certificate
        return {
            "certificate": "valid",
            "bundle": built.bundle,
            "created": built.created,
            "signed_by": None if self.signer is None else {"name": self.signer[0], "key": self.signer[1]},
            "compilations": built.compilations,
            "requests": built.requests.count,
            "buckets": len(built.buckets),
            "executables": len(built.executables),
            "blind": {w.monitor: w.blind for w in built.monitors if w.blind},
        }


def check(path: str | Path, bundle: Bundle, keyring: Keyring, allow_unsigned: bool = False) -> Checked:
    """Read a certificate and require that it is of `bundle` and holds on this host.

    Raises UntrustedError if the signature is invalid, or if no trusted key signed the file. An unsigned file passes
    with `allow_unsigned`, unless the keyring requires signatures.

    Raises ArtifactError if the file is not a certificate, is of another bundle, or comes from another device or
    toolchain. Raises VerificationError if it reports a compilation, is incomplete, or contradicts itself.
    """
    built, content, signature = read_file(path)
    signer = _signer(str(path), content, signature, keyring, allow_unsigned)
    _require_of(str(path), built, bundle)
    if problems := list(_problems(built)):
        raise VerificationError(f"{path}: {'; '.join(problems[:SHOWN])}: it certifies nothing")
    _require_here(str(path), built)
    return Checked(built, signer)


def _signer(
    path: str, content: bytes, signature: bytes | None, keyring: Keyring, allow_unsigned: bool
) -> tuple[str, str] | None:
    verdict = None if signature is None else keyring.check(content, signature, path)
    if verdict is not None and verdict.key is not None:
        return verdict.key.name, verdict.key.key.id
    if allow_unsigned and not keyring.require_signatures:
        return None
    said = "is not signed" if signature is None else "is not signed by a key that is trusted here"
    remedy = (
        "unset LLMC_REQUIRE_SIGNATURES" if keyring.require_signatures else "accept it with --allow-unsigned"
    )  # fmt: skip
    raise UntrustedError(
        f"{path}: the certificate {said}; sign it where it is created with `llmc warmup --certify --sign KEY`, trust "
        f"that key here with `llmc cache trust KEY.pub`, or {remedy}"
    )


def _require_of(path: str, built: Certificate, bundle: Bundle) -> None:
    manifest = bundle.manifest
    if built.bundle != manifest.digest:
        raise ArtifactError(
            f"{path}: of another bundle, {built.bundle:.100}; {bundle.path} is {manifest.digest}: certify it with "
            f"`llmc warmup {bundle.path} --certify FILE`"
        )
    verification = digest_bytes(canonical_json(manifest.verification)) if manifest.verification else None
    listed = [(e.name, e.key, e.state, e.blob) for e in built.executables]
    differ = [
        name
        for name, mine, theirs in (
            ("plan", built.plan, manifest.plan),
            ("executables", listed, [(str(e), e.key, e.state, e.blob) for e in manifest.executables]),
            ("device", built.device, manifest.device),
            ("executor", built.executor, manifest.executor),
            ("verification", built.verification, verification),
        )
        if mine != theirs
    ]
    planned = [(b.phase, b.batch, b.query, b.context) for b in bundle.plan.buckets]
    if [(b.phase, b.batch, b.query, b.context) for b in built.buckets] != planned:
        differ.append("buckets")
    if differ:
        raise ArtifactError(f"{path}: is of the bundle {bundle.path}, but states another {' and '.join(differ)}")


def _require_here(path: str, built: Certificate) -> None:
    here = host(built.host.threads)
    differ = [
        f"{name} {_words(theirs)}, here {_words(mine)}"
        for name, theirs, mine in (
            ("system", built.host.system, here.system), ("machine", built.host.machine, here.machine),
            ("instruction sets", built.host.features, here.features),
        )
        if theirs != mine
    ]  # fmt: skip
    accelerator = executor_class(built.executor).description.host()
    for name in sorted({*built.accelerator, *accelerator}):
        if built.accelerator.get(name) != accelerator.get(name):
            differ.append(f"{name} {built.accelerator.get(name, 'none'):.80}, here {accelerator.get(name, 'none'):.80}")
    for package, version in built.toolchain.items():
        if package != "python" and (found := installed(package)) != version:
            differ.append(f"{package} {version:.80}, here {found or 'none'}")
    if differ:
        raise ArtifactError(f"{path}: made on another device or toolchain: {'; '.join(differ[:SHOWN])}; certify here")


def _words(found: object) -> str:
    return " ".join(map(str, found))[:200] if isinstance(found, tuple) else str(found)[:80]


def _problems(built: Certificate) -> Iterator[str]:
    """Yield each reason why the content certifies nothing."""
    yield from _monitor_problems(built)
    unused = [b for b in built.buckets if not built.any_shape and not b.replays + b.steps]
    if unused:
        yield f"{len(unused)} of {len(built.buckets)} buckets never ran"
    if not any(e.replays + e.steps for e in built.executables):
        yield "no executable ever ran"
    if not built.any_shape and (idle := [e.name for e in built.executables if not e.replays + e.steps]):
        yield f"{len(idle)} of {len(built.executables)} executables never ran"
    if not built.any_shape and sum(b.steps for b in built.buckets) != sum(e.steps for e in built.executables):
        yield "its buckets and its executables count different steps"
    requests = built.requests
    if not requests.count:
        yield "no request ran"
    if sum(requests.kinds.values()) != requests.count or sum(requests.finished.values()) < requests.count:
        yield f"not all of its {requests.count} requests ended"
    if set(requests.finished) - {"stop", "length", "abort"}:
        yield "some of its requests ended with an error"


def _monitor_problems(built: Certificate) -> Iterator[str]:
    names = Counter(account.monitor for account in built.monitors)
    if missing := [name for name in NEEDED if name not in names]:
        yield f"no report from {', '.join(missing)}"
    if twice := [name for name, count in names.items() if count > 1]:
        yield f"{', '.join(twice)} reports twice"
    for account in built.monitors:
        if account.after or account.names_after:
            some = ", ".join(account.names_after[:SHOWN])
            yield f"once it was ready, {account.monitor} saw {account.after} ({some})"
        for count, seen in ((account.before, account.names_before), (account.after, account.names_after)):
            if len(seen) > (count or 0):
                yield f"{account.monitor} counts {count} and names {len(seen)}"
            if count is None and not account.blind:
                yield f"{account.monitor} does not say what it saw, nor why"
