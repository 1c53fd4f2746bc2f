"""Keys that follow from a number, so that every signature in the tests is the same each time."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from llmc.artifacts.key import canonical_json
from llmc.artifacts.signing.envelope import PAYLOAD_TYPE
from llmc.artifacts.signing.keyring import Keyring
from llmc.artifacts.signing.signer import Signer
from tests.artifacts.helpers import manifest

PKCS8_HEAD = bytes.fromhex("302e020100300506032b657004220420")
MANIFEST = manifest(provenance={"buildDefinition": {"buildType": "test"}, "runDetails": {"builder": {"id": "us"}}})
CONTENT = MANIFEST.to_bytes()
OTHER = manifest(device="hpu").to_bytes()


def seed(number: int) -> bytes:
    """The 32 secret bytes of a key."""
    return hashlib.sha256(f"llmc test key {number}".encode()).digest()


def private_pem(number: int) -> bytes:
    text = base64.b64encode(PKCS8_HEAD + seed(number))
    return b"-----BEGIN PRIVATE KEY-----\n" + text + b"\n-----END PRIVATE KEY-----\n"


def secrets_of(pem: bytes) -> list[str]:
    """What must never be seen of a private key: the base64 lines of its file, and its secret bytes in hex."""
    lines = [line for line in pem.decode().splitlines() if line and "-----" not in line]
    raw = base64.b64decode("".join(lines))[-32:]
    return [*lines, raw.hex(), base64.b64encode(raw).decode(), repr(raw)]


def signer(folder: Path, number: int) -> Signer:
    """A signer, with its key files "key<number>" and "key<number>.pub" in `folder`."""
    path = folder / f"key{number}"
    path.write_bytes(private_pem(number))
    path.chmod(0o600)
    found = Signer.load(path)
    path.with_name(f"{path.name}.pub").write_bytes(found.public.pem())
    return found


def keyring(folder: Path, *trusted: Signer, **how: bool) -> Keyring:
    """A keyring that trusts these keys."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in trusted:
        (folder / f"{one.public.short}.pub").write_bytes(one.public.pem())
    return Keyring(folder, **how)


def edited(signature: bytes, **members: Any) -> bytes:
    """An envelope with other members."""
    return canonical_json(json.loads(signature) | members)


def statement(signature: bytes) -> dict[str, Any]:
    """The statement in an envelope."""
    found: dict[str, Any] = json.loads(base64.b64decode(json.loads(signature)["payload"]))
    return found


def signed_by(one: Signer, payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """An envelope over any payload, as somebody with the key could make it."""
    text = f"DSSEv1 {len(payload_type)} {payload_type} {len(payload)} ".encode() + payload
    value = base64.b64encode(one._sign(text)).decode()
    document = {
        "payloadType": payload_type,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [{"keyid": one.public.id, "sig": value}],
    }
    return canonical_json(document)
