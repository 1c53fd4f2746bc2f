"""HTTPS: one server and several processes with a certificate, and certificates that cannot be used."""

from __future__ import annotations

import datetime
import ssl
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from llmc.errors import InputError
from llmc.server.listening import require_certificate
from llmc.server.serve import listen_at
from llmc.server.state import ServerConfig
from tests.server.live import Live, completion


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of this host that signs itself, and its key."""
    folder, key = tmp_path_factory.mktemp("tls"), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(built.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return files


def test_a_server_with_a_certificate_speaks_https_alone(bundle: Path, certificate: tuple[Path, Path]) -> None:
    config = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1]}
    listener = listen_at(ServerConfig(port=0, **config), None)
    assert listener.url.startswith("https://127.0.0.1:")
    with Live(bundle, listener=listener, **config) as live, httpx.Client(verify=_trusting(certificate)) as client:
        live.ready()
        answer = client.post(f"{listener.url}/v1/completions", json=completion(stream=True))
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{live.port}/health")
        assert client.get(f"{listener.url}/health").status_code == 200


def _trusting(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate[0]))


def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    other = tmp_path / "other.pem"
    with pytest.raises(InputError, match=r"--ssl-certfile .*other.pem: cannot be used: No such file"):
        require_certificate(other, None)
    other.write_text("no certificate")
    with pytest.raises(InputError, match=r"other\.pem, --ssl-keyfile .*key\.pem: cannot be used"):
        require_certificate(other, certificate[1])
    with pytest.raises(InputError, match="cannot be used"):
        require_certificate(certificate[0], certificate[0])
    with pytest.raises(InputError, match="--ssl-keyfile needs --ssl-certfile"):
        require_certificate(None, certificate[1])
    assert not require_certificate(None, None)
