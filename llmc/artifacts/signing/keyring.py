"""The keyring: which keys are trusted, and what is accepted without a signature (contract: bundle/trust.py).

    <folder>/<name>.pub      one public key per file (see keys.py); other files in the folder are ignored

A name is 1 to 64 letters, digits, ".", "_" or "-", and begins with a letter or digit. Removing a file ends trust. If
users other than this one and root can write there, nothing is trusted (ownership.py).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from llmc.artifacts.atomic_write import make_folder, sync_folder, write_atomic, writing
from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.ownership import exposed
from llmc.artifacts.signing.envelope import decode, require_about
from llmc.artifacts.signing.keys import (
    PUBLIC_MODE,
    SUFFIX,
    PublicKey,
    is_signature,
    parse_public,
    read_public,
    read_small,
    short_id,
    why,
)
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.settings import Settings


SHORTEST_ID = 8
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class TrustedKey(NamedTuple):
    """A trusted key, under the name of its file."""

    name: str
    key: PublicKey
    file: Path

    def __str__(self) -> str:
        return f"{self.name} ({self.key.short})"


class TrustedKeys:
    """The trusted keys of one folder, which need not exist. Read at each call, so a removed key is gone at once."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def all(self) -> list[TrustedKey]:
        """Return every trusted key, by name.

        Raises UntrustedError, naming the file, for a key that cannot be read, is not an Ed25519 public key, or could
        have been written by others.
        """
        found = []
        for file in self._files():
            try:
                found.append(TrustedKey(file.name.removesuffix(SUFFIX), _load(file), file))
            except (OSError, ValueError) as error:
                raise UntrustedError(
                    f"{file}: not a key that can be trusted: {why(error)}; fix it, or remove it"
                ) from error
        return found

    def add(self, path: Path, name: str | None = None) -> tuple[TrustedKey, bool]:
        """Trust the key in a public key file; return it and whether it is new. `name` defaults to the file's own.

        Raises InputError for anything but a public key, without copying it, for an invalid name, and for the name of
        another key; CapacityError or UnwritableError if the folder cannot be written.
        """
        key = read_public(path)
        for known in self.all():
            if known.key == key:
                return known, False
        name = name or path.name.removesuffix(SUFFIX)
        if not _NAME.fullmatch(name):
            raise InputError(f"{name!r:.80} cannot be the name of a key ({_NAME.pattern}); choose one with --name")
        file = self._file(name)
        if os.path.lexists(file):
            raise InputError(f"another key is trusted under the name {name}; choose another with --name")
        with writing(file, len(key.pem()), "name another folder by LLMC_TRUSTED_KEYS"):
            make_folder(self.folder)
            write_atomic(file, key.pem(), self.folder)
            file.chmod(PUBLIC_MODE)
        return TrustedKey(name, key, file), True

    def remove(self, what: str) -> list[Path]:
        """Stop trusting a key, by name or id (at least 8 digits); return the removed files.

        Every file that holds the key is removed, so that no second name of it stays. Raises InputError if there is no
        such key or more than one, UnwritableError if the folder cannot be written.
        """
        files = self._holding(what)
        with writing(self.folder, 0, "remove the file as its owner"):
            for file in files:
                file.unlink(missing_ok=True)
            sync_folder(self.folder)
        return files

    def _holding(self, what: str) -> list[Path]:
        keys: dict[Path, PublicKey | None] = {file: _try_load(file) for file in self._files()}
        named = self._file(what)
        if named in keys:
            ids = {keys[named]}
        else:
            enough = len(what) >= SHORTEST_ID
            ids = {key for key in keys.values() if key is not None and enough and key.id.startswith(what.lower())}
        if len(ids) != 1:
            problem = (
                "is the beginning of more than one id" if ids else "is neither the name nor the id of a trusted key"
            )
            raise InputError(f"{what!r:.80} {problem} in {self.folder}; `llmc cache trust --list` lists them")
        (key,) = ids
        return [named] if key is None else [file for file, found in keys.items() if found == key]

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    def _files(self) -> list[Path]:
        """Return the key files. Raises UntrustedError for a folder that cannot be read, or that others may write to."""
        try:
            names = sorted(os.listdir(self.folder))  # noqa: PTH208 - names alone, as in bundle/writer.py
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UntrustedError(
                f"{self.folder}: the trusted keys cannot be read ({error.strerror}); make it a readable folder, or "
                "name another by LLMC_TRUSTED_KEYS"
            ) from error
        files = [self.folder / name for name in names if name.endswith(SUFFIX)]
        if files and (found := exposed(self.folder)) is not None:
            raise UntrustedError(f"{self.folder}: others may put keys there: {found}; {found.fix}")
        return files


def _load(file: Path) -> PublicKey:
    if (found := exposed(file.parent, [file])) is not None:
        raise ValueError(f"{found}; {found.fix}")
    return parse_public(read_small(file)[1])


def _try_load(file: Path) -> PublicKey | None:
    try:
        return _load(file)
    except (OSError, ValueError):
        return None


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
                if is_signature(item.key.raw, one.value, envelope.signed_bytes):
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
