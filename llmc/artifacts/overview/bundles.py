"""The bundles of a store: their content, what they share, and who signed them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.manifest_schema import FILE_NAME, MAX_BYTES, SIGNATURE_NAME
from llmc.artifacts.bundle.stored import KIND, require_agreement
from llmc.artifacts.overview.survey import Listed, Survey
from llmc.artifacts.signing.keys import short_id
from llmc.artifacts.store.audit import Share, shares
from llmc.artifacts.store.blobs import Blobs
from llmc.errors import ArtifactError, DeviceError

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.signing.keyring import Keyring

MOST_READ = 500
"""Most bundles whose manifests are read, last used first; the others have only their entries' facts."""

UNKNOWN = "?"


@dataclass(frozen=True)
class HeldBundle:
    """A bundle; `between` splits its bytes into those of no other bundle (own) and those of others too (shared).

    `plan` is the digest of its plan, `signed` describes who signed it; both are "?" if they were not read. `problem`
    says what is wrong with it, or is "".
    """

    listed: Listed
    between: Share
    model: str
    device: str
    graphs: str
    plan: str
    signed: str
    problem: str


def bundles(survey: Survey, keyring: Keyring) -> list[HeldBundle]:
    """Return the bundles, most recently used first."""
    listed = sorted((one for one in survey.entries if one.entry.key.kind == KIND), key=lambda one: -one.used)
    between = shares(one.entry for one in listed)
    blobs = Blobs(survey.layout)
    return [
        _held(one, between[one.entry.key.digest], blobs if index < MOST_READ else None, keyring)
        for index, one in enumerate(listed)
    ]


def _held(listed: Listed, between: Share, blobs: Blobs | None, keyring: Keyring) -> HeldBundle:
    meta = listed.entry.meta
    model, device, graphs = (str(meta.get(name, UNKNOWN)) for name in ("model", "device", "executables"))
    plan = signed = UNKNOWN
    problem = ""
    if blobs is not None:
        try:
            manifest, signature = _read(listed, blobs)
            model, device = str(manifest.model.get("name", model)), manifest.device
            graphs, plan = f"{len(manifest.executables):,}", str(manifest.provenance.get("plan", UNKNOWN))[:12]
            signed = _signed(manifest, signature, keyring)
        except (ArtifactError, DeviceError) as error:
            problem = str(error)
    return HeldBundle(listed, between, model, device, graphs, plan, signed, problem)


def _read(listed: Listed, blobs: Blobs) -> tuple[Manifest, bytes | None]:
    """Like `read_bundle`, but mark nothing as used and move nothing damaged."""
    entry, source = listed.entry, f"bundle {listed.entry.key.short}"
    if FILE_NAME not in entry.outputs:
        raise ArtifactError(f"{source}: it names no {FILE_NAME}")
    manifest = Manifest.from_bytes(_content(entry.outputs[FILE_NAME], blobs, f"{source}: {FILE_NAME}"), source)
    signed = entry.outputs.get(SIGNATURE_NAME)
    signature = None if signed is None else _content(signed, blobs, f"{source}: {SIGNATURE_NAME}")
    require_agreement(entry, manifest, signature, source)
    return manifest, signature


def _content(blob: Blob, blobs: Blobs, source: str) -> bytes:
    if blob.size > MAX_BYTES:
        raise ArtifactError(f"{source}: larger than {MAX_BYTES} bytes")
    if blobs.find(*blob, verify=False) is None or (data := blobs.read(blob.digest)) is None:
        raise ArtifactError(f"{source}: missing or damaged; `llmc cache verify` shows details")
    return data


def _signed(manifest: Manifest, signature: bytes | None, keyring: Keyring) -> str:
    """Describe who signed it. Raises ArtifactError for an invalid signature, DeviceError if none can be checked."""
    if signature is None:
        return "no"
    verdict = keyring.check(manifest.to_bytes(), signature, manifest.source)
    if verdict.key is not None:
        return f"by {verdict.key.name}"
    keys = ", ".join(short_id(claimed) or "an unnamed key" for claimed in verdict.claimed)
    return f"by {keys}, not trusted here"
