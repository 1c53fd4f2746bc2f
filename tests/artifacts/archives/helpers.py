"""What the tests of archives share: small bundles and stores, a trust that signs with words, and hostile tars."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.artifacts.archives.compression import Compressor
from llmc.artifacts.archives.format import END, blob_name, header, padding
from llmc.artifacts.archives.reader import Imported, import_archive
from llmc.artifacts.archives.writer import Item, bundle_contents, entry_contents, write_archive
from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.manifest_schema import CHECKSUM_NAME, FILE_NAME, checksum_line
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.store.store import Store
from llmc.errors import ArtifactError
from tests.artifacts.helpers import CONTENT, DIGESTS, manifest, sources


class Words:
    """A trust whose signatures are text: `signer:digest`; it knows the signer "friend"."""

    def __init__(self, *, allow_unsigned: bool = False) -> None:
        self._allow_unsigned = allow_unsigned
        self.asked: list[tuple[str, bool]] = []

    def require(self, content: bytes, signature: bytes | None, *, native: bool, origin: str) -> str | None:
        self.asked.append((origin, native))
        signer, _, digest = (signature or b"nobody:").decode().strip('"').partition(":")
        if signature is not None and digest != digest_bytes(content):
            raise UntrustedError(f"{origin}: the signature is not of this content")
        if signer == "friend":
            return signer
        if native and not self._allow_unsigned:
            raise UntrustedError(f"{origin}: native code that is not signed by a trusted key")
        return None


def sign(content: bytes, signer: str = "friend") -> bytes:
    return f"{signer}:{digest_bytes(content)}".encode()


def bundle(folder: Path, signature: bytes | None = None, **changes: object) -> BundleFiles:
    """A bundle folder over CONTENT."""
    write_bundle(folder, manifest(**changes), sources(folder.parent / "model"), signature)
    return BundleFiles.open(folder)


def export_one(item: Item, dest: Path, store: Store | None = None, level: int | None = None) -> bytes:
    write_archive(bundle_contents(store or Store(dest.parent / "unused"), item), dest, level=level)
    return dest.read_bytes()


def export_all(store: Store, dest: Path, level: int | None = None) -> bytes:
    write_archive(entry_contents(store, store.entries()), dest, level=level)
    return dest.read_bytes()


def import_bytes(store: Store, data: bytes, *, required: bool = False) -> Imported:
    """Import `data` from a file beside the store, unsigned code too."""
    path = store.root.with_name(f"{store.root.name}.tar")
    path.write_bytes(data)
    return import_archive(store, path, trust=Words(allow_unsigned=True), required=required)


def member(name: str, content: bytes) -> bytes:
    return header(name, len(content)) + content + bytes(padding(len(content)))


def head(of: Manifest) -> bytes:
    content = of.to_bytes()
    return member(FILE_NAME, content) + member(CHECKSUM_NAME, checksum_line(digest_bytes(content)))


def blob_members() -> list[bytes]:
    """A member for each of CONTENT, in the order of an archive."""
    return [member(blob_name(DIGESTS[name]), CONTENT[name]) for name in sorted(CONTENT, key=DIGESTS.__getitem__)]


def sound() -> bytes:
    """The archive of `manifest()`, put together by hand."""
    return head(manifest()) + b"".join(blob_members()) + END


def refused(store: Store, data: bytes) -> str:
    with pytest.raises(ArtifactError) as caught:
        import_bytes(store, data)
    message = str(caught.value)
    assert message.startswith(f"{store.root}.tar: ") and "\n" not in message
    assert "nothing was imported" in message
    return message


def squeezed(data: bytes) -> bytes:
    compressor = Compressor(1)
    return compressor.compress(data) + compressor.flush()
