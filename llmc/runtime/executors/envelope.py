"""llmc's executable file for devices whose compiler has none: a JSON header, then sections of bytes used in place.

    file     = magic length header padding ( section padding )*     no padding after the last section
    magic    = eight bytes: seven identify the form, the last is a digit that counts incompatible changes
    length   = size of header in bytes, uint64, little endian, at most MAX_HEADER
    header   = canonical JSON {"digest": sha256 of the canonical JSON of header without it, "version": 1,
               "sections": {name: [offset, size], …}, …} with the writer's other members
    padding  = zeros up to a multiple of 64
    section  = bytes; they follow each other in the order of their names, offset counts from the start of the file

Security. A file may come from anywhere. Reading one never runs, evaluates or unpickles anything, copies only the
header, and raises only ArtifactError. The digest detects damage; sections are trusted through the digest of the whole
file, by which bundles and stores name it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from mmap import mmap
from typing import Any, NamedTuple, NoReturn

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.errors import ArtifactError
from llmc.strict_json import loads_object

VERSION = 1
ALIGNMENT = 64
MAX_HEADER = 16 << 20
RESERVED = frozenset({"digest", "sections", "version"})
"""Header members of the format itself."""

_MAGIC_BYTES = 8
_FRAME = _MAGIC_BYTES + 8
_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}")


class Form(NamedTuple):
    """A kind of file: its `magic` (bundle/trust.py lists those of code), and its name ("an XLA executable")."""

    magic: bytes
    what: str


def write_envelope(header: Mapping[str, Any], sections: Mapping[str, bytes], form: Form) -> bytes:
    """The file of `sections`, with the members of `header`; equal arguments give equal bytes.

    Raises ValueError or TypeError for a header that is not JSON, too large or uses the format's members, and for an
    invalid section name (_NAME).
    """
    if taken := RESERVED & set(header):
        raise ValueError(f"{sorted(taken)} are members of the format")
    if odd := [name for name in sections if not _NAME.fullmatch(name)]:
        raise ValueError(f"{odd[0]!r:.80} is not the name of a section")
    sizes = {name: len(sections[name]) for name in sorted(sections)}
    encoded = b""
    while len(encoded) != len(encoded := _encode(header, _layout(len(encoded), sizes))):  # offsets change its length
        pass
    if len(encoded) > MAX_HEADER:
        raise ValueError(f"the header has {len(encoded)} bytes, more than {MAX_HEADER}")
    out = bytearray(form.magic + len(encoded).to_bytes(8, "little") + encoded)
    for name, (offset, _) in _layout(len(encoded), sizes).items():
        out += bytes(offset - len(out)) + sections[name]
    return bytes(out)


class ExecutableFile:
    """A parsed file: `header`, the writer's members of it, and the sections. Treat the header as read-only."""

    __slots__ = ("_sections", "header", "source")

    def __init__(self, header: dict[str, Any], sections: dict[str, memoryview], source: str) -> None:
        self.header = header
        self.source = source
        self._sections = sections

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview | mmap, source: str, form: Form) -> ExecutableFile:
        """Read and check `data`, which sections keep referencing. `source` names it in errors. Raises only
        ArtifactError.
        """
        view = memoryview(data).cast("B").toreadonly()
        found = bytes(view[:_MAGIC_BYTES])
        if found[:-1] != form.magic[:-1]:
            _fail(source, f"not {form.what} of llmc")
        if found > form.magic:
            _newer(source, form, repr(found))
        if found < form.magic:
            _fail(source, f"{form.what} of format {found!r}, which an older llmc wrote")
        length = int.from_bytes(view[_MAGIC_BYTES:_FRAME], "little")
        if length > min(MAX_HEADER, max(len(view) - _FRAME, 0)):
            _fail(source, f"damaged: a header of {length} bytes in a file of {len(view)}")
        members = _decode(bytes(view[_FRAME : _FRAME + length]), source, form)
        return cls(
            {name: value for name, value in members.items() if name not in RESERVED},
            _cut(view, length, members["sections"], source),
            source,
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sections)

    def section(self, name: str) -> memoryview:
        """A section's bytes, read-only and in place; raises ArtifactError if there is none."""
        if name not in self._sections:
            _fail(self.source, f"no section {name!r}; it has {', '.join(self._sections) or 'none'}")
        return self._sections[name]


def _encode(header: Mapping[str, Any], layout: Mapping[str, tuple[int, int]]) -> bytes:
    body = {**header, "version": VERSION, "sections": layout}
    return canonical_json({**body, "digest": digest_bytes(canonical_json(body))})


def _decode(data: bytes, source: str, form: Form) -> dict[str, Any]:
    try:
        members = loads_object(data)
        if type(version := members.get("version")) is int and version > VERSION:
            _newer(source, form, f"version {version}")
        body = {name: value for name, value in members.items() if name != "digest"}
        if members.get("digest") != digest_bytes(canonical_json(body)) or data != canonical_json(members):
            _fail(source, "damaged: its header is not what was written")
    except (ValueError, RecursionError) as error:
        _fail(source, f"damaged: its header is not JSON ({error})", error)
    if type(version) is not int or version != VERSION:
        _fail(source, f"version {version!r:.40} of the format is not one that llmc ever wrote")
    return members


def _cut(view: memoryview, length: int, found: object, source: str) -> dict[str, memoryview]:
    if not isinstance(found, dict) or not all(_is_placement(name, placement) for name, placement in found.items()):
        _fail(source, "'sections' must be {name: [offset, size]}")
    layout = _layout(length, {name: size for name, (_, size) in sorted(found.items())})
    end = _FRAME + length
    for name, (offset, size) in layout.items():
        if found[name][0] != offset:
            _fail(source, f"section {name!r} begins at {found[name][0]} by the header, but must begin at {offset}")
        if any(view[end:offset]):
            _fail(source, f"damaged: there are bytes before section {name!r}")
        end = offset + size
    if end != len(view):
        _fail(source, f"damaged: it has {len(view)} bytes, its header says {end}")
    return {name: view[offset : offset + size] for name, (offset, size) in layout.items()}


def _is_placement(name: str, placement: object) -> bool:
    return (
        _NAME.fullmatch(name) is not None
        and isinstance(placement, list)
        and len(placement) == 2
        and all(type(number) is int and 0 <= number < 1 << 63 for number in placement)
    )


def _layout(length: int, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    placements, end = dict[str, tuple[int, int]](), _FRAME + length
    for name, size in sizes.items():
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        placements[name] = offset, size
        end = offset + size
    return placements


def _newer(source: str, form: Form, version: str) -> NoReturn:
    raise ArtifactError(
        f"{source}: {form.what} of format {version}, which a newer llmc wrote; upgrade llmc, or compile it again "
        f"with this version of `llmc compile`"
    )


def _fail(source: str, problem: str, cause: Exception | None = None) -> NoReturn:
    raise ArtifactError(f"{source}: {problem}; compile it again with `llmc compile`") from cause
