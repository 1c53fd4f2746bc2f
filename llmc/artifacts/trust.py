"""What has to be signed: the contract between the borders of the store (remotes, archives) and the keyring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from llmc.errors import ArtifactError

if TYPE_CHECKING:
    from llmc.artifacts.key import Key
    from llmc.artifacts.manifest import Manifest


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


def is_native(key: Key) -> bool:
    """Whether a key asks for native code."""
    return key.components.get("state") == "native"


def holds_native(manifest: Manifest) -> bool:
    """Whether a bundle holds native code."""
    return any(item.state == "native" for item in manifest.executables)
