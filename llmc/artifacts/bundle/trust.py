"""Trust in signatures: the contract between the keyring and the ways into the store (remotes, archives)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from llmc.artifacts.bundle.native import code_among
from llmc.errors import ArtifactError


class UntrustedError(ArtifactError):
    """A signature is missing, wrong, or by an untrusted key; the message says which."""


class Trust(Protocol):
    """Decides which results may enter the store; implemented by `llmc.artifacts.signing.keyring.Keyring`."""

    def require(self, content: bytes, signature: bytes | None, *, native: bool, origin: str) -> str | None:
        """Return the id of the trusted key that signed `content`; None if it needs no signature and has no valid one.

        `content` is what was signed (a manifest's file, an entry's body), `signature` the content of a signature file,
        and `origin` the source of both, for messages. Native code needs a signature by a trusted key unless unsigned
        code is allowed. Raises UntrustedError.
        """
        ...


class TrustDecision:
    """The decision to accept a result; `signer` is the id of the trusted key that signed it, or None.

    A result accepted as data is examined again when its files have arrived, because their content was unknown before.
    """

    def __init__(self, trust: Trust, content: bytes, signature: bytes | None, *, native: bool, origin: str) -> None:
        """Decide by `trust`; the arguments are those of `Trust.require`. Raises UntrustedError."""
        self.signer = trust.require(content, signature, native=native, origin=origin)
        self._settled = native or self.signer is not None
        self._trust, self._content, self._signature, self._origin = trust, content, signature, origin

    def examine(self, files: Iterable[Path]) -> None:
        """Raise UntrustedError if the result was accepted as data and one of its files is code."""
        if self._settled:
            return
        try:
            found = code_among(files)
        except OSError as error:
            raise UntrustedError(f"{self._origin}: a received file cannot be read ({error.strerror})") from error
        if found is not None:
            origin = f"{self._origin} (holds {found})"
            self._trust.require(self._content, self._signature, native=True, origin=origin)
