"""Signing with a private key."""

from __future__ import annotations

from pathlib import Path

from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.signing.envelope import Envelope, Signature, decode, encode, make_statement
from llmc.artifacts.signing.keys import PublicKey, Sign, is_encrypted, load_private, read_private
from llmc.errors import InputError
from llmc.paths import expanded
from llmc.settings import Settings


class Signer:
    """Signs with one key. It holds no bytes of the key, shows only the public id, and cannot be pickled."""

    __slots__ = ("_sign", "public")

    def __init__(self, sign: Sign, public: PublicKey) -> None:
        self._sign = sign
        self.public = public

    def __repr__(self) -> str:
        return f"Signer({self.public.short})"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a Signer stays in its process")

    @classmethod
    def load(cls, path: str | Path, passphrase: str | None = None) -> Signer:
        """Load the signer of a private key file; `passphrase` counts only if the file is encrypted.

        Raises InputError if the file cannot be read, is readable by others, is not an Ed25519 private key, or needs
        another passphrase; and DeviceError if `cryptography` is not installed.
        """
        file = expanded(path)
        pem = read_private(file)
        if not is_encrypted(pem):
            passphrase = None
        elif not passphrase:
            raise InputError(f"{file}: the private key has a passphrase; set LLMC_SIGNING_PASSPHRASE")
        try:
            sign, raw = load_private(pem, passphrase)
        except ValueError as error:
            raise InputError(f"{file}: the private key cannot be used: {error}") from None
        return cls(sign, PublicKey(raw))

    @classmethod
    def from_settings(cls, settings: Settings) -> Signer | None:
        """Load the signer of LLMC_SIGNING_KEY; None if it is not set. Raises as `load` does."""
        if settings.signing_key is None:
            return None
        return cls.load(settings.signing_key, settings.signing_passphrase)

    def sign(self, content: bytes, existing: bytes | None = None) -> bytes:
        """Return the content of a signature file for a manifest's file or an entry's body.

        `existing` is the present signature file: other keys' signatures in it stay. The same content and key give the
        same bytes. Raises UntrustedError if the statement in `existing` differs from the one signed now, so that nobody
        else's words are signed unseen, and InputError for content that cannot be signed.
        """
        try:
            payload = make_statement(content)
        except ValueError as error:
            raise InputError(f"this cannot be signed: {error}") from error
        others: tuple[Signature, ...] = ()
        if existing is not None:
            others = tuple(one for one in self._existing(existing, payload) if one.claimed != self.public.id)
        envelope = Envelope(payload, others)
        mine = Signature(self.public.id, self._sign(envelope.signed_bytes))
        try:
            return encode(Envelope(payload, (*others, mine)))
        except ValueError as error:
            raise InputError(f"this cannot be signed: {error}") from error

    def _existing(self, existing: bytes, payload: bytes) -> tuple[Signature, ...]:
        remedy = "remove it, and sign again"
        try:
            envelope = decode(existing)
        except ValueError as error:
            raise UntrustedError(f"the existing signature is not valid ({error}); {remedy}") from error
        if envelope.payload != payload:
            raise UntrustedError(f"the existing signature is of other content, or by another llmc; {remedy}")
        return envelope.signatures
