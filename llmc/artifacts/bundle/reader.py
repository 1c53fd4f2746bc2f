"""Reading a bundle folder. bundle/writer.py writes one.

<bundle>/manifest.json            see manifest.py
<bundle>/manifest.sha256          optional: the manifest's checksum, as `sha256sum -c` reads it
<bundle>/signature.json           optional: signatures of manifest.json, which cover every blob by its digest; see
                                  signing/envelope.py
<bundle>/blobs/sha256/<64 hex>    every blob by its digest, in one folder because graphs name their weights as
                                  sibling files
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from llmc.artifacts.bundle.manifest import FILE_NAME, PORTABLE_NAME, SIGNATURE_NAME, Manifest, read_manifest
from llmc.artifacts.bundle.trust import code_of_bundle
from llmc.artifacts.digest import digest_bytes, digest_file, is_digest, open_regular, parse
from llmc.artifacts.folder_swap import siblings
from llmc.artifacts.log import logger
from llmc.artifacts.ownership import Exposed, exposed, owners
from llmc.artifacts.verified_files import VerifiedFiles, signature
from llmc.errors import ArtifactError
from llmc.paths import exists, is_dir

if TYPE_CHECKING:
    from llmc.artifacts.store.leases import Lease
    from llmc.settings import Settings


BLOBS = Path("blobs", "sha256")
SAVE_STAMPS_FROM = 8 << 20
MAX_SIGNATURE_BYTES = 1 << 20
IN_STORE = "bundles"
"""The folder for bundles in a store (store/layout.py)."""


def blob_path(folder: Path, digest: str) -> Path:
    """Return the path of a blob in a bundle. Raises ValueError for an invalid digest."""
    return folder / BLOBS / parse(digest)


def _lease(folder: Path) -> Lease | None:
    """Lease a bundle inside a store. Others need no lease, and skip the imports that it needs."""
    if Path(os.path.abspath(folder)).parent.name != IN_STORE:  # noqa: PTH100 - links are the user's business
        return None
    from llmc.artifacts.store.leases import lease_of_bundle

    return lease_of_bundle(folder)


class BundleFiles:
    """An open bundle: its manifest, and its blobs, each verified before use.

    A missing, truncated or altered blob raises ArtifactError, which says what it is for and how to restore it. No blob
    stays open. `close` (or leaving the `with` block) saves the verification stamps for the next start, and ends the
    lease that protects a bundle inside a store from collection.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, stamps: VerifiedFiles, lease: Lease | None = None,
        settings: Settings | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.manifest = manifest
        self._stamps = stamps
        self._lease = lease
        self._settings = settings

    @classmethod
    def open(cls, path: str | Path, settings: Settings | None = None) -> BundleFiles:
        """Open a bundle folder; reads only its manifest. `settings` name trusted folders (default: none).

        First restores a bundle whose replacement was interrupted between two renames. Raises
        ArtifactError for an invalid bundle or an unknown schema.
        """
        folder = Path(path)
        lease = _lease(folder)
        if not exists(folder):
            recover(folder)
        manifest = read_manifest(folder)
        if not is_dir(folder):
            raise ArtifactError(f"{folder}: not a bundle folder; name the folder that holds the manifest")
        return cls(folder, manifest, VerifiedFiles(folder, inside=False), lease, settings)

    def __enter__(self) -> BundleFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Save the verification stamps and end the lease."""
        self._stamps.save()
        if self._lease is not None:
            self._lease.release()

    @property
    def signature(self) -> bytes | None:
        """The content of the signature file, or None if absent. Raises ArtifactError if it cannot be read."""
        path = self.folder / SIGNATURE_NAME
        try:
            with open_regular(path) as file:
                data = file.read(MAX_SIGNATURE_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ArtifactError(f"{path}: the signature cannot be read ({error.strerror})") from error
        if len(data) > MAX_SIGNATURE_BYTES:
            raise ArtifactError(f"{path}: larger than a signature can be ({MAX_SIGNATURE_BYTES} bytes)")
        return data

    def digest(self, name: str) -> str:
        """Return the digest of a named file, or of a blob given by digest. Raises ArtifactError if it is not listed."""
        digest = self.manifest.files.get(name, name)
        if digest not in self.manifest.blobs:
            kind = "blob" if is_digest(name) else "file"
            known = ", ".join(sorted(self.manifest.files)) or "none"
            raise ArtifactError(f"{self.folder}: the bundle has no {kind} {name!r:.100}; its files: {known}")
        return digest

    def path(self, name: str) -> Path:
        """Return the file of a blob, by file name or digest, after verifying its size and digest.

        The digest is not computed again while the blob's stamp is valid (verified_files.py). The file may be
        memory-mapped. It is read-only and may be shared with the store; never write to it.
        """
        digest = self.digest(name)
        path = blob_path(self.folder, digest)
        seen = self._stat(path, digest)
        if self._stamps.verified(path, digest):
            return path
        try:
            found = digest_file(path)
        except OSError as error:
            self._fail(digest, f"cannot be read ({error.strerror})", error)
        if found != digest:
            self._fail(digest, f"was altered: its content has digest {found}")
        self._stamps.record(path, digest, signature(seen))
        if seen.st_size >= SAVE_STAMPS_FROM:
            self._stamps.save()
        return path

    def read(self, name: str) -> bytes:
        """Return the content of a blob, by file name or digest; exactly the returned bytes were hashed."""
        digest = self.digest(name)
        path = blob_path(self.folder, digest)
        self._stat(path, digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            self._fail(digest, f"cannot be read ({error.strerror})", error)
        found = digest_bytes(data)
        if found != digest:
            self._fail(digest, f"was altered: its content has digest {found}")
        return data

    @cached_property
    def exposed(self) -> Exposed | None:
        """What users other than this one and root can change in the bundle, or None (ownership.py).

        Blobs may be links to a shared store's, so the owners of shared stores are trusted as well.
        """
        from llmc.settings import Settings

        settings = self._settings or Settings()
        files = [self.folder / FILE_NAME, *(blob_path(self.folder, digest) for digest in self.manifest.blobs)]
        users = owners(settings.shared_caches)
        return exposed(self.folder, files, users=users, trusted=settings.trusted_folders)

    def require_native(self, what: str) -> None:
        """Raise ArtifactError unless `what` may be loaded as code. Call this before loading it.

        The bundle must count as native (trust.py), because one received as data needed no signature. No other user may
        be able to change it.
        """
        self._require_judged_native(what)
        if (found := self.exposed) is not None:
            raise ArtifactError(
                f"{self.folder}: {what} is native code that others may change, so it is not loaded: {found}; "
                f"{found.remedy}"
            )

    def _require_judged_native(self, what: str) -> None:
        if code_of_bundle(self.manifest) is None:
            raise ArtifactError(
                f"{self.folder}: {what} is native code in a bundle that counts as portable, so no signature was "
                f"required; it is not loaded: compile again with `llmc compile MODEL --device {self.manifest.device}`"
            )

    def within(self, name: str) -> BundleFiles:
        """Open the bundle whose manifest is the file `name` of this one, over the same blobs. Raises ArtifactError."""
        self._require_judged_native(name)
        manifest = Manifest.from_bytes(self.read(name), f"{self.folder}: {name}")
        if missing := [digest for digest in manifest.blobs if digest not in self.manifest.blobs]:
            raise ArtifactError(f"{self.folder}: {name} names blob {missing[0]}, which the bundle does not have")
        return BundleFiles(self.folder, manifest, self._stamps, settings=self._settings)

    def portable_half(self) -> BundleFiles:
        """Return the portable source of a bundle compiled on the target; otherwise the bundle itself.

        Raises ArtifactError if the source is not data (trust.py): nothing of it may be loaded as code.
        """
        if PORTABLE_NAME not in self.manifest.files:
            return self
        half = self.within(PORTABLE_NAME).manifest
        if (code := code_of_bundle(half)) is not None:
            raise ArtifactError(f"{self.folder}: {PORTABLE_NAME} is not portable: it has {code}; compile it again")
        return BundleFiles(self.folder, half, self._stamps, self._lease, self._settings)

    def verify(self, progress: Callable[[str, int], None] | None = None) -> list[str]:
        """Read every blob, ignoring stamps, and return the errors found; empty for an intact bundle."""
        errors = []
        for digest, size in self.manifest.blobs.items():
            try:
                path = blob_path(self.folder, digest)
                self._stat(path, digest)
                found = digest_file(path)
                if found != digest:
                    self._fail(digest, f"was altered: its content has digest {found}")
            except ArtifactError as error:
                errors.append(str(error))
            except OSError as error:
                errors.append(f"{self.folder}: blob {digest} cannot be read ({error.strerror})")
            if progress is not None:
                progress(digest, size)
        return errors

    def _stat(self, path: Path, digest: str) -> os.stat_result:
        try:
            seen = path.stat()
        except FileNotFoundError as error:
            self._fail(digest, "is missing", error)
        except OSError as error:
            self._fail(digest, f"cannot be read ({error.strerror})", error)
        expected = self.manifest.blobs[digest]
        if not stat.S_ISREG(seen.st_mode):
            self._fail(digest, "is not a regular file")
        if seen.st_size != expected:
            self._fail(digest, f"has {seen.st_size} bytes, expected {expected}")
        return seen

    def _fail(self, digest: str, problem: str, cause: BaseException | None = None) -> NoReturn:
        remedy = f"llmc compile MODEL --device {self.manifest.device} -o {self.folder}"
        raise ArtifactError(
            f"{self.folder}: blob {digest} ({self.manifest.use_of(digest)}) {problem}; "
            f"compile into this folder again with `{remedy}`"
        ) from cause


def recover(folder: Path) -> bool:
    """Restore a bundle whose replacement was interrupted between the two renames; return whether there was one.

    This can happen only where the system cannot exchange names. A live writer then finds the path occupied and retries.
    """
    if folder.exists():
        return False
    old = [Path(item.path) for item in siblings(folder, "old") if (Path(item.path) / FILE_NAME).is_file()]
    for path in sorted(old, key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(OSError):
            path.rename(folder)
            logger().warning("%s: restored after an interrupted replacement", folder)
            return True
    return False
