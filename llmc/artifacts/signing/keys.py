"""Key files: the private key, which signs and never leaves its machine, and the public key, which is given to others.

    private = PEM of PKCS #8, readable only by its owner; optionally encrypted by a passphrase
    public  = PEM of SubjectPublicKeyInfo (RFC 8410): the 12 bytes SPKI_HEAD, then the key's 32 bytes

    key id  = sha256 of the 44 bytes of SubjectPublicKeyInfo, in hex; its first 16 digits are displayed

`openssl genpkey -algorithm ed25519` creates such files too. Errors never contain any of a private key's content. The
package `cryptography` (Ed25519, RFC 8032) is imported only here, and only when needed. A private key stays inside the
package's own object: callers get a function that signs, and no bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from llmc.artifacts.atomic_write import create_exclusive, discard, sync_folder, write_all, writing
from llmc.errors import DeviceError, InputError
from llmc.platforms import missing

SPKI_HEAD = bytes.fromhex("302a300506032b6570032100")
KEY_BYTES = 32
MAX_BYTES = 16 << 10
PRIVATE_MODE = 0o600
PUBLIC_MODE = 0o644
SUFFIX = ".pub"
_PUBLIC = re.compile(rb"\s*-----BEGIN PUBLIC KEY-----\s+([A-Za-z0-9+/=\s]+?)\s*-----END PUBLIC KEY-----\s*")
_SECRET = b"PRIVATE KEY-----"
_ENCRYPTED = b"ENCRYPTED"
_OTHERS = 0o077
_TAKEN = "{}: already exists, and a key is never replaced; choose another name"


class PublicKey(NamedTuple):
    """A public key of 32 bytes."""

    raw: bytes

    @property
    def id(self) -> str:
        """The key id: 64 hex digits."""
        return hashlib.sha256(SPKI_HEAD + self.raw).hexdigest()

    @property
    def short(self) -> str:
        """The id's first digits, for display."""
        return short_id(self.id)

    def pem(self) -> bytes:
        """Return the content of a public key file."""
        text = base64.b64encode(SPKI_HEAD + self.raw)
        return b"-----BEGIN PUBLIC KEY-----\n" + text + b"\n-----END PUBLIC KEY-----\n"

    def __repr__(self) -> str:
        return f"PublicKey({self.short})"


def short_id(key_id: str) -> str:
    """Return the displayed digits of a key id."""
    return key_id[:16]


def parse_public(data: bytes) -> PublicKey:
    """Parse the content of a public key file. Raises ValueError, whose text holds none of it, for anything else."""
    if _SECRET in data:
        raise ValueError(f"a private key; give the public one ({SUFFIX}), and keep this file to yourself")
    found = _PUBLIC.fullmatch(data)
    if found is None:
        raise ValueError("not one public key in PEM")
    try:
        content = base64.b64decode(b"".join(found[1].split()), validate=True)
    except binascii.Error as error:
        raise ValueError("not one public key in PEM") from error
    if len(content) != len(SPKI_HEAD) + KEY_BYTES or not content.startswith(SPKI_HEAD):
        raise ValueError("a public key of another algorithm than Ed25519")
    return PublicKey(content[len(SPKI_HEAD) :])


def read_public(path: Path) -> PublicKey:
    """Read a public key file. Raises InputError naming the file."""
    try:
        return parse_public(read_small(path)[1])
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {why(error)}; an Ed25519 key comes from `llmc cache keygen`") from error


def read_private(path: Path) -> bytes:
    """Return the content of a private key file.

    Raises InputError naming the file, also if it is this user's but others may read it, as ssh does.
    """
    try:
        seen, data = read_small(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: the private key cannot be used: {why(error)}") from None
    if _SECRET not in data:
        raise InputError(f"{path}: the private key cannot be used: not a private key in PEM")
    if seen.st_uid == os.geteuid() and seen.st_mode & _OTHERS:
        raise InputError(
            f"{path}: others may read this private key (mode {seen.st_mode & 0o777:03o}); chmod 600 {path}"
        )
    return data


def is_encrypted(pem: bytes) -> bool:
    """Whether a private key needs a passphrase."""
    return _ENCRYPTED in pem


def write_pair(path: Path, passphrase: str | None = None) -> PublicKey:
    """Create a key: the private part at `path`, readable only by its owner, the public one next to it (`.pub`).

    Replaces nothing. Raises InputError if one of the two exists, or for an empty passphrase, CapacityError or
    UnwritableError if they cannot be written (then neither exists), and DeviceError.
    """
    if passphrase == "":
        raise InputError("the passphrase is empty: give one, or leave it out")
    public_path = public_file(path)
    for file in (path, public_path):
        if os.path.lexists(file):
            raise InputError(_TAKEN.format(file))
    pem, raw = generate_key(passphrase)
    public = PublicKey(raw)
    _write_new(path, pem, PRIVATE_MODE)
    try:
        _write_new(public_path, public.pem(), PUBLIC_MODE)
    except BaseException:
        discard(path)
        raise
    return public


def public_file(path: Path) -> Path:
    """Return the path of the public part of a private key file."""
    return path.with_name(path.name + SUFFIX)


def _write_new(path: Path, data: bytes, mode: int) -> None:
    with writing(path, len(data), "choose another location"):
        try:
            fd = create_exclusive(path, mode)
        except FileExistsError:
            raise InputError(_TAKEN.format(path)) from None
        try:
            try:
                write_all(fd, data)
                os.fchmod(fd, mode)
                os.fsync(fd)
            finally:
                os.close(fd)
            sync_folder(path.parent)
        except BaseException:
            discard(path)
            raise


def read_small(path: Path) -> tuple[os.stat_result, bytes]:
    """Return the status and content of a regular file of at most MAX_BYTES. Raises OSError or ValueError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode):
            raise ValueError("not a regular file")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"larger than a key can be ({MAX_BYTES} bytes)")
    return seen, data


def why(error: OSError | ValueError) -> str:
    """Describe what is wrong with a key file."""
    return f"it cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)


Sign = Callable[[bytes], bytes]


def is_signature(public: bytes, signature: bytes, message: bytes) -> bool:
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


def generate_key(passphrase: str | None) -> tuple[bytes, bytes]:
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


def load_private(pem: bytes, passphrase: str | None) -> tuple[Sign, bytes]:
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
