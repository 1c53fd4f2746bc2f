"""HTTPS: any registry but one on this machine, and its certificate is checked."""

from __future__ import annotations

import datetime
import socket
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from llmc.artifacts.oci import push_image
from llmc.artifacts.remotes.base import RemoteError
from llmc.artifacts.store.store import Store
from tests.artifacts.oci.conftest import StartRegistry
from tests.artifacts.oci.helpers import make_bundle, pulled

pytestmark = pytest.mark.full

HOST = "registry.test"


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of HOST, signed by itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST)])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem, key_pem = folder / "cert.pem", folder / "key.pem"
    pem.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8
    key_pem.write_bytes(key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption()))
    return pem, key_pem


@pytest.fixture
def reference(start_registry: StartRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A name in a registry that speaks TLS, at a host that is not known to be this machine; its certificate."""
    pem, key = certificate(tmp_path)
    port = start_registry({"tls": {"certificate": str(pem), "key": str(key)}})
    resolve = socket.getaddrinfo

    def here(host: str, *arguments: Any, **named: Any) -> Any:
        return resolve("127.0.0.1" if host == HOST else host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", here)
    return f"oci://{HOST}:{port}/models/tiny:v1", pem


def test_a_registry_with_a_certificate_of_a_known_authority_is_used(
    reference: tuple[str, Path], tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, pem = reference
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(pem))
    assert push_image(store, make_bundle(store), name).entries == 1
    pulled(tmp_path, name)


def test_a_registry_with_another_certificate_is_refused_at_once(reference: tuple[str, Path], store: Store) -> None:
    with pytest.raises(RemoteError, match=r"SSLError.*certificate.*REQUESTS_CA_BUNDLE"):
        push_image(store, make_bundle(store), reference[0])
