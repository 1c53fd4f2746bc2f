"""Signature files: a statement in an envelope with its signatures (DSSE v1, as Sigstore and in-toto use it).

    signature file = {"payloadType": PAYLOAD_TYPE, "payload": base64 of a statement,
                      "signatures": [{"keyid": 64 hex, "sig": base64 of 64 bytes}, …]}        1 to 16 of them

A signature covers PAE(payloadType, payload):

    "DSSEv1" SP LEN(type) SP type SP LEN(payload) SP payload        LEN in bytes, decimal; SP one space

Source: https://github.com/secure-systems-lab/dsse, protocol.md and envelope.md. As they require, unknown members are
ignored, base64 may be of either alphabet, and "keyid" is a hint that proves nothing.

The signed content is a statement about a manifest, an entry or a certificate, by its digest (in-toto Statement v1):

    statement = {"_type": TYPE, "subject": [{"name": "manifest.json" | "entry" | "certificate",
                                             "digest": {"sha256": 64 hex}}],
                 "predicateType": PROVENANCE | CONTENT, "predicate": {…}}

    PROVENANCE    for a bundle: how it was built, as its manifest's provenance says (SLSA provenance v1)
    CONTENT       for an entry, {"kind": its kind}; for a bundle without provenance, {"kind": "bundle"}; for a
                  certificate (runtime/certificate/document.py), {"kind": CERTIFICATE}

Sources: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md and https://slsa.dev/provenance/v1. A
statement of another type by the same key (such as a failed scan) does not count as a signature here.
"""

from __future__ import annotations

import base64
import re
from typing import Any, NamedTuple

from llmc.artifacts.bundle.manifest import FILE_NAME
from llmc.artifacts.bundle.manifest import KIND as MANIFEST
from llmc.artifacts.bundle.reader import MAX_SIGNATURE_BYTES
from llmc.artifacts.bundle.stored import KIND as BUNDLE
from llmc.artifacts.digest import digest_bytes, parse
from llmc.artifacts.key import canonical_json
from llmc.strict_json import loads_object

VERSION = "DSSEv1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
MAX_SIGNATURES = 16
SIGNATURE_BYTES = 64
_KEY_ID = re.compile(r"[0-9a-f]{64}")


class Signature(NamedTuple):
    """64 bytes of Ed25519, and the key id that they claim: 64 hex digits, or "" for a claim of another form."""

    claimed: str
    value: bytes


class Envelope(NamedTuple):
    """A payload and its signatures, none of them checked."""

    payload: bytes
    signatures: tuple[Signature, ...]

    @property
    def signed_bytes(self) -> bytes:
        """The bytes that the signatures cover."""
        head = f"{VERSION} {len(PAYLOAD_TYPE)} {PAYLOAD_TYPE} {len(self.payload)} "
        return head.encode() + self.payload


def encode(envelope: Envelope) -> bytes:
    """Return the content of a signature file. Raises ValueError for too many bytes or signatures."""
    signatures = [{"keyid": item.claimed, "sig": _base64(item.value)} for item in envelope.signatures]
    document = {"payloadType": PAYLOAD_TYPE, "payload": _base64(envelope.payload), "signatures": signatures}
    data = canonical_json(document) + b"\n"
    if len(data) > MAX_SIGNATURE_BYTES:
        raise ValueError(f"its signature would have {len(data)} bytes, more than the limit of {MAX_SIGNATURE_BYTES}")
    if len(signatures) > MAX_SIGNATURES:
        raise ValueError(f"it already has {MAX_SIGNATURES} signatures, which is the limit")
    return data


def decode(data: bytes) -> Envelope:
    """Parse a signature file's content. Raises ValueError, and nothing else, for anything but an envelope."""
    if len(data) > MAX_SIGNATURE_BYTES:
        raise ValueError(f"larger than {MAX_SIGNATURE_BYTES} bytes")
    document = loads_object(data)
    if document.get("payloadType") != PAYLOAD_TYPE:
        raise ValueError(f"its payload is not of type {PAYLOAD_TYPE}")
    signatures = document.get("signatures")
    if not isinstance(signatures, list) or not 1 <= len(signatures) <= MAX_SIGNATURES:
        raise ValueError(f"it does not have 1 to {MAX_SIGNATURES} signatures")
    return Envelope(_bytes(document.get("payload")), tuple(_signature(item) for item in signatures))


def _signature(item: object) -> Signature:
    if not isinstance(item, dict):
        raise ValueError("a signature is not an object")
    value = _bytes(item.get("sig"))
    if len(value) != SIGNATURE_BYTES:
        raise ValueError(f"a signature has {len(value)} bytes, which is not Ed25519's {SIGNATURE_BYTES}")
    claimed = item.get("keyid")
    return Signature(claimed if isinstance(claimed, str) and _KEY_ID.fullmatch(claimed) else "", value)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: object) -> bytes:
    if not isinstance(text, str):
        raise ValueError("a value is not base64")
    try:
        return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
    except ValueError as error:
        raise ValueError(f"a value is not base64 ({error})") from error


TYPE = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
CONTENT = "urn:llmc:content:v1"
CERTIFICATE = "llmc-certificate"
_PREDICATE = ("buildDefinition", "runDetails")


def make_statement(content: bytes) -> bytes:
    """Return the statement about a manifest's file, an entry's body or a certificate's content.

    The same content gives the same bytes. Raises ValueError for other content.
    """
    document = loads_object(content)
    if document.get("kind") == MANIFEST:
        name, kind, predicate = FILE_NAME, BUNDLE, _provenance(document)
    elif document.get("kind") == CERTIFICATE:
        name, kind, predicate = "certificate", CERTIFICATE, None
    elif isinstance(document.get("components"), dict) and isinstance(document.get("kind"), str):
        name, kind, predicate = "entry", document["kind"], None
    else:
        raise ValueError("neither a manifest, nor an entry, nor a certificate")
    statement = {
        "_type": TYPE,
        "subject": [{"name": name, "digest": {"sha256": _digits(content)}}],
        "predicateType": CONTENT if predicate is None else PROVENANCE,
        "predicate": {"kind": kind} if predicate is None else predicate,
    }
    return canonical_json(statement)


def require_about(payload: bytes, content: bytes) -> None:
    """Raise ValueError, and nothing else, unless `payload` is a statement that vouches for `content`."""
    statement = loads_object(payload)
    if statement.get("_type") != TYPE:
        raise ValueError(f"its payload is not a statement of type {TYPE}")
    if statement.get("predicateType") not in (PROVENANCE, CONTENT):
        raise ValueError("its payload is a statement of another type, which vouches for nothing here")
    subject = statement.get("subject")
    if not isinstance(subject, list) or len(subject) != 1 or not isinstance(subject[0], dict):
        raise ValueError("its payload is not a statement about one subject")
    digest = subject[0].get("digest")
    if not isinstance(digest, dict) or digest.get("sha256") != _digits(content):
        raise ValueError("it signs other content than this")


def _provenance(document: dict[str, Any]) -> dict[str, Any] | None:
    provenance = document.get("provenance", {})
    if not isinstance(provenance, dict) or not all(isinstance(provenance.get(name), dict) for name in _PREDICATE):
        return None
    return {name: provenance[name] for name in _PREDICATE}


def _digits(content: bytes) -> str:
    return parse(digest_bytes(content))
