"""The signed content: a statement about a manifest, an entry or a certificate, by its digest (in-toto Statement v1).

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

from typing import Any

from llmc.artifacts.bundle.manifest_schema import FILE_NAME
from llmc.artifacts.bundle.manifest_schema import KIND as MANIFEST
from llmc.artifacts.bundle.stored import KIND as BUNDLE
from llmc.artifacts.digest import digest_bytes, parse
from llmc.artifacts.key import canonical_json
from llmc.strict_json import loads_object

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
