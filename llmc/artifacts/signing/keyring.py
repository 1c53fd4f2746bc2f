"""The keyring: which signatures count here, and what is accepted without one (contract: bundle/trust.py)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.signing.envelope import decode
from llmc.artifacts.signing.keys import short_id
from llmc.artifacts.signing.statement import require_about
from llmc.artifacts.signing.trusted import TrustedKey, TrustedKeys

if TYPE_CHECKING:
    from llmc.settings import Settings

_ALLOW = "take it unsigned with --allow-unsigned or LLMC_ALLOW_UNSIGNED=1"
_UNSET = "unset LLMC_REQUIRE_SIGNATURES"
_UNNAMED = "an unnamed key"


class Verdict(NamedTuple):
    """The trusted key that signed something; otherwise None and the key ids that the signatures claim, unproven."""

    key: TrustedKey | None
    claimed: tuple[str, ...]


class Keyring:
    """Implements `Trust`. With `require_signatures`, everything needs one, and `allow_unsigned` is ignored.

    The folder is read at every check, so a key that is removed from it loses trust at once.
    """

    def __init__(self, trusted: str | Path, *, allow_unsigned: bool = False, require_signatures: bool = False) -> None:
        self._trusted = TrustedKeys(trusted)
        self._allow_unsigned = allow_unsigned
        self.require_signatures = require_signatures

    @classmethod
    def from_settings(cls, settings: Settings, allow_unsigned: bool = False) -> Keyring:
        """Create this user's keyring; `allow_unsigned` is the command's flag, which the settings may set as well."""
        return cls(
            settings.trusted_keys,
            allow_unsigned=allow_unsigned or settings.allow_unsigned,
            require_signatures=settings.require_signatures,
        )

    def require(self, content: bytes, signature: bytes | None, *, native: bool, origin: str) -> str | None:
        """Return the id of the trusted key that signed `content`, or None, as `Trust.require` describes.

        An existing signature must be valid, whether one is needed or not. Raises UntrustedError, and DeviceError if a
        signature cannot be checked because `cryptography` is missing.
        """
        verdict = Verdict(None, ()) if signature is None else self.check(content, signature, origin)
        if verdict.key is not None:
            return verdict.key.key.id
        if self.require_signatures or (native and not self._allow_unsigned):
            self._refuse(verdict, native, origin)
        return None

    def check(self, content: bytes, signature: bytes, origin: str) -> Verdict:
        """Return who signed `content`, according to the content of a signature file and the trusted keys.

        Raises UntrustedError for an invalid file, a signature of other content, or a wrong signature that claims a
        trusted key while no other trusted key signed; and DeviceError as `require` does.
        """
        try:
            envelope = decode(signature)
            require_about(envelope.payload, content)
        except ValueError as error:
            self._tampered(origin, str(error), error)
        trusted = self._trusted.all()
        for one in envelope.signatures:
            for item in trusted:
                if _signed(item, one.value, envelope.signed_bytes):
                    return Verdict(item, ())
        ids = {item.key.id for item in trusted}
        for one in envelope.signatures:
            if one.claimed in ids:
                self._tampered(origin, f"key {short_id(one.claimed)}, which it names, did not make it")
        return Verdict(None, tuple(one.claimed for one in envelope.signatures))

    def trusts(self, key_id: str) -> bool:
        """Whether the key of an id is trusted now. Raises UntrustedError as `TrustedKeys.all` does."""
        return any(item.key.id == key_id for item in self._trusted.all())

    def _refuse(self, verdict: Verdict, native: bool, origin: str) -> NoReturn:
        what = "native code" if native else "the content"
        remedy = _UNSET if self.require_signatures else _ALLOW
        if verdict.claimed:
            keys = ", ".join(sorted({short_id(claimed) or _UNNAMED for claimed in verdict.claimed}))
            raise UntrustedError(
                f"{origin}: {what} is signed by {keys}, which is not trusted here; if you expect that signer, trust "
                f"the key with `llmc cache trust KEY.pub`; or {remedy}"
            )
        raise UntrustedError(
            f"{origin}: {what} is not signed; sign it where it was built with `llmc cache sign` and trust that key "
            f"here with `llmc cache trust KEY.pub`; or {remedy}"
        )

    def _tampered(self, origin: str, reason: str, cause: Exception | None = None) -> NoReturn:
        raise UntrustedError(
            f"{origin}: its signature is not valid: {reason}; get both again from their source, or, if you created "
            "them, sign again with `llmc cache sign`"
        ) from cause


def _signed(item: TrustedKey, signature: bytes, message: bytes) -> bool:
    from llmc.artifacts.signing.ed25519 import verify

    return verify(item.key.raw, signature, message)
