"""Ed25519 (RFC 8032) with the package `cryptography`, which is imported only here, and only when needed.

A private key stays inside the package's own object: callers get a function that signs, and no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from llmc.errors import DeviceError
from llmc.platforms import missing

Sign = Callable[[bytes], bytes]


def verify(public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether `signature` (64 bytes) of `message` is by the key `public` (32 bytes). Raises DeviceError."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        _missing("a signature cannot be checked", error)
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def generate(passphrase: str | None) -> tuple[bytes, bytes]:
    """Generate a key: its private part as PEM (PKCS #8, encrypted if there is a passphrase) and its public 32 bytes.

    Raises DeviceError if `cryptography` is not installed.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import (
            BestAvailableEncryption,
            Encoding,
            KeySerializationEncryption,
            NoEncryption,
            PrivateFormat,
        )
    except ImportError as error:
        _missing("a key cannot be created", error)
    protection: KeySerializationEncryption = NoEncryption()
    if passphrase is not None:
        protection = BestAvailableEncryption(passphrase.encode())
    key = Ed25519PrivateKey.generate()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection), key.public_key().public_bytes_raw()


def load(pem: bytes, passphrase: str | None) -> tuple[Sign, bytes]:
    """Load a private key in PEM; return its signing function and its public 32 bytes.

    `passphrase` is None for an unencrypted key. Raises ValueError, whose text holds nothing of the key, for anything
    but an Ed25519 key and its passphrase, and DeviceError if `cryptography` is not installed.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        _missing("nothing can be signed", error)
    try:
        key = load_pem_private_key(pem, None if passphrase is None else passphrase.encode())
    except (ValueError, TypeError, UnsupportedAlgorithm):
        reason = "not a private key in PEM" if passphrase is None else "the passphrase is wrong, or the file is damaged"
        raise ValueError(reason) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError("a private key of another algorithm than Ed25519")
    return key.sign, key.public_key().public_bytes_raw()


def _missing(what: str, error: ImportError) -> NoReturn:
    raise DeviceError(f"{what}: {missing('cryptography')}") from error
