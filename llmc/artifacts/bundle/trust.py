"""Signatures: the contract between the borders of the store (remotes, archives) and the keyring."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from llmc.artifacts.bundle.native import code_among
from llmc.errors import ArtifactError


class UntrustedError(ArtifactError):
    """Something whose signature is missing, wrong, or of a key that is not trusted; the message says which."""


class Trust(Protocol):
    """Decides what may come in. `llmc.artifacts.signing.keyring.Keyring` is the implementation."""

    def require(self, content: bytes, signature: bytes | None, *, native: bool, origin: str) -> str | None:
        """The id of the trusted key that signed `content`; None when it needs no signature and has no valid one.

        `content` is what was signed (a manifest's file, an entry's body), `signature` the content of a signature
        file, `origin` where both come from, for messages. Native code needs a signature by a trusted key unless
        unsigned code is allowed. Raises UntrustedError.
        """
        ...


class TrustDecision:
    """How something came in: by the id of the trusted key that signed it (`signer`), or without one.

    A result taken as data is examined again when its files have arrived, because their content was not known before.
    """

    def __init__(self, trust: Trust, content: bytes, signature: bytes | None, *, native: bool, origin: str) -> None:
        """Arguments as those of `Trust.require`, which is asked. Raises UntrustedError."""
        self.signer = trust.require(content, signature, native=native, origin=origin)
        self._settled = native or self.signer is not None
        self._trust, self._content, self._signature, self._origin = trust, content, signature, origin

    def examine(self, files: Iterable[Path]) -> None:
        """Raise UntrustedError when one of the files is code, which it may not be for what came in as data."""
        if self._settled:
            return
        try:
            found = code_among(files)
        except OSError as error:
            raise UntrustedError(f"{self._origin}: what came cannot be read again ({error.strerror})") from error
        if found is not None:
            origin = f"{self._origin} (holds {found})"
            self._trust.require(self._content, self._signature, native=True, origin=origin)
