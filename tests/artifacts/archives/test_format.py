"""The header of a member: what other programs make of it, and that nothing else is taken for one."""

from __future__ import annotations

import tarfile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmc.artifacts.archives.format import (
    BLOCK,
    Member,
    blob_digest,
    blob_name,
    entry_name,
    header,
    packed,
    read_header,
)
from llmc.artifacts.key import Key
from tests.artifacts.helpers import DIGESTS
from tests.tiers import examples

NAMES = st.sampled_from(
    [
        "manifest.json",
        blob_name(DIGESTS["weights"]),
        entry_name(Key("executable", {})),
        entry_name(Key("k" * 64, {"batch": 4})),
    ]
)
SIZES = st.integers(0, 1 << 50)


@given(NAMES, SIZES)
@example("manifest.json", 8**11 - 1)
@example("manifest.json", 8**11)
def test_a_header_reads_back_and_tarfile_reads_the_same(name: str, size: int) -> None:
    block = header(name, size)
    assert len(block) == BLOCK
    assert read_header(block) == Member(name, size)
    info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    assert (info.name, info.size, info.isreg()) == (name, size, True)
    assert (info.mode, info.uid, info.gid, info.mtime, info.uname, info.gname) == (0o444, 0, 0, 0, "", "")


@given(NAMES, st.integers(0, 8**11 - 1))
def test_a_header_is_to_the_byte_what_tarfile_writes_where_ustar_can(name: str, size: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o444
    assert header(name, size) == info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


@examples(300)
@given(NAMES, SIZES, st.integers(0, BLOCK * 8 - 1))
def test_no_flipped_bit_of_a_header_is_overlooked(name: str, size: int, bit: int) -> None:
    block = bytearray(header(name, size))
    block[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match="header"):
        read_header(bytes(block))


@given(st.binary(min_size=BLOCK, max_size=BLOCK))
def test_noise_is_not_a_header(block: bytes) -> None:
    with pytest.raises(ValueError, match="not a tar header"):
        read_header(block)


def test_a_name_or_size_without_a_header() -> None:
    for name, size in (("", 0), ("n" * 101, 0), ("a/" * 100 + "n", 0), ("n", -1), ("n", 1 << 64)):
        with pytest.raises(ValueError, match="no header for"):
            header(name, size)


def test_sizes_in_the_archive_are_whole_blocks() -> None:
    assert [packed(size) for size in (0, 1, 512, 513)] == [512, 1024, 1024, 1536]


def test_only_the_name_of_a_blob_is_one() -> None:
    name = blob_name(DIGESTS["decode"])
    assert blob_digest(name) == DIGESTS["decode"]
    for other in (name.upper(), f"./{name}", f"{name} ", name[:-1], name.removeprefix("blobs/"), f"/{name}"):
        assert blob_digest(other) is None
