"""The archive: bundles, or entries with their blobs, as one tar that depends on its content alone.

    archive  = (bundle | entries) blobs end                          optionally one zstd frame around it all
    bundle   = "manifest.json" "manifest.sha256" ["signature.json"]  one bundle: unpacked, it is a bundle folder
    entries  = {"entries/" kind "/" 64 hex ".json"}                  several things; see entries.py
    blobs    = {"blobs/sha256/" 64 hex}                              each blob that is named above, once
    end      = 1024 zero bytes; nothing comes after it

"manifest.sha256" is the line `<64 hex>  manifest.json`, as sha256sum writes and checks it: the only part of an archive
that no digest elsewhere covers. Entries and blobs ascend by name. A bundle among several is an entry of kind "bundle"
with the time 0, so that it too depends on its manifest only; kinds that begin with "local-" are never in an archive.

A member is a ustar header (POSIX.1-1988), its content, and zeros up to 512 bytes. A header says name and size and
nothing else: mode 0444, owner, group and time 0, no names of them. A size of 8 GiB or more is in base 256, as GNU tar
writes it. There are no folders, links, devices or extension headers, so a reader need not understand any.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from llmc.artifacts.digest import PREFIX, is_digest, parse
from llmc.artifacts.key import Key
from llmc.errors import ArtifactError

VERSION = 1
"""Version of the member names. Another version uses other names, which this one refuses."""

BLOCK = 512
END = bytes(2 * BLOCK)
PIECE = 1 << 20
BLOB_FOLDER = "blobs/sha256/"
ENTRY_FOLDER = "entries/"
MAX_ENTRY_BYTES = 256 << 20
"""Limit in bytes for all entries of an archive together: they stay in memory until their blobs have arrived."""

_NAME_BYTES = 100
_PREFIX_BYTES = 155
_OCTAL_LIMIT = 8**11
_TYPES = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"5": "a folder",
    b"6": "a fifo",
    b"S": "a sparse file",
    b"x": "an extension header (PAX)",
    b"g": "an extension header (PAX)",
    b"L": "an extension header (GNU long name)",
    b"K": "an extension header (GNU long link)",
}


class Member(NamedTuple):
    """Name and size in bytes of a member."""

    name: str
    size: int


def blob_name(digest: str) -> str:
    """The member that holds a blob. Raises ValueError for a text that is not a digest."""
    return BLOB_FOLDER + parse(digest)


def blob_digest(name: str) -> str | None:
    """The digest of the blob that a member holds; None when it is another sort of member."""
    digest = PREFIX + name.removeprefix(BLOB_FOLDER)
    return digest if name.startswith(BLOB_FOLDER) and is_digest(digest) else None


def entry_name(key: Key) -> str:
    """The member that holds the entry of a key."""
    return f"{ENTRY_FOLDER}{key.kind}/{key.hex}.json"


def padding(size: int) -> int:
    """Zero bytes after a content of `size` bytes."""
    return -size % BLOCK


def packed(size: int) -> int:
    """Bytes that a member of `size` bytes takes in the archive, header and padding included."""
    return BLOCK + size + padding(size)


def header(name: str, size: int) -> bytes:
    """The one header of a member. Raises ValueError for a name or a size that fits into none."""
    folder, base = "", name
    if len(name) > _NAME_BYTES:
        folder, _, base = name.rpartition("/")
    if not 0 < len(base) <= _NAME_BYTES or len(folder) > _PREFIX_BYTES or not 0 <= size < 1 << 64:
        raise ValueError(f"no header for {name!r:.200} of {size} bytes")
    block = bytearray(BLOCK)
    fields = (
        (0, base.encode("ascii")),
        (100, b"0000444\0"),
        (108, b"0000000\0"),
        (116, b"0000000\0"),
        (124, b"%011o\0" % size if size < _OCTAL_LIMIT else b"\x80" + size.to_bytes(11, "big")),
        (136, b"00000000000\0"),
        (148, b"        "),
        (156, b"0"),
        (257, b"ustar\x0000"),
        (345, folder.encode("ascii")),
    )
    for at, value in fields:
        block[at : at + len(value)] = value
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def read_header(block: bytes) -> Member:
    """The member that a header announces. Raises ValueError for any but the header that `header` makes of it."""
    found = _claimed(block)
    if found is not None and found.name:
        try:
            if header(*found) == block:
                return found
        except ValueError as error:
            raise ValueError(f"a member's {error}") from None
    checked = bytearray(block)
    checked[148:156] = b"        "
    if found is None or _octal(block[148:154]) != sum(checked):
        raise ValueError("not a tar header, or a damaged one")
    kind = _TYPES.get(block[156:157])
    if kind is not None:
        raise ValueError(f"{found.name!r:.200} is {kind}; an archive holds regular files only")
    raise ValueError(f"the header of {found.name!r:.200} says more than a name and a size")


def fail(source: str, problem: str) -> NoReturn:
    """Raise ArtifactError about an archive, of which nothing was imported."""
    raise ArtifactError(f"{source}: {problem}; nothing was imported: make it again with `llmc cache export`")


def _claimed(block: bytes) -> Member | None:
    size = int.from_bytes(block[125:136], "big") if block[124] == 0x80 else _octal(block[124:135])
    try:
        base, folder = (field.partition(b"\0")[0].decode("ascii") for field in (block[:100], block[345:500]))
    except UnicodeDecodeError:
        return None
    return None if size is None else Member(f"{folder}/{base}" if folder else base, size)


def _octal(field: bytes) -> int | None:
    digits = field.rstrip(b" \0")
    return int(digits, 8) if digits and all(0x30 <= digit <= 0x37 for digit in digits) else None
