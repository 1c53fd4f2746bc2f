from __future__ import annotations

import io
import tarfile
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.oci import tar
from llmc.artifacts.oci.tar import Member, Reader
from llmc.errors import ArtifactError

NAMES = st.from_regex(r"[a-z0-9][a-z0-9./_-]{0,99}", fullmatch=True).filter(lambda name: not name.endswith("/"))
FILES = st.lists(st.tuples(NAMES, st.binary(max_size=2000)), max_size=6, unique_by=lambda file: file[0])


def archive(files: list[tuple[str, bytes]], folders: tuple[str, ...] = ()) -> bytes:
    return b"".join(tar.write(folders, ((Member(name, len(data)), [data]) for name, data in files)))


def read(data: bytes, files: list[tuple[str, bytes]], folders: tuple[str, ...] = (), cut: int = 700) -> list[bytes]:
    reader = Reader((data[at : at + cut] for at in range(0, len(data), cut)), "test")
    reader.folders(folders)
    found = [b"".join(reader.file(Member(name, len(content)))) for name, content in files]
    reader.end()
    return found


@given(FILES)
def test_pythons_tarfile_reads_what_is_written(files: list[tuple[str, bytes]]) -> None:
    data = archive(files, ("blobs/",))
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        folder, *members = opened.getmembers()
        assert folder.isdir() and folder.name == "blobs" and folder.mode == 0o555
        for member, (name, content) in zip(members, files, strict=True):
            stream = opened.extractfile(member)
            assert stream is not None and (member.name, stream.read()) == (name, content)
            facts = (member.type, member.mode, member.mtime, member.uid, member.gid, member.uname, member.linkname)
            assert facts == (tarfile.REGTYPE, 0o444, 0, 0, 0, "", "")


@given(FILES, st.integers(1, 3000))
def test_what_is_written_is_read_back_in_pieces_of_any_length(files: list[tuple[str, bytes]], cut: int) -> None:
    data = archive(files, ("blobs/",))
    assert len(data) == tar.archive_size(("blobs/",), [Member(name, len(content)) for name, content in files])
    assert read(data, files, ("blobs/",), cut) == [content for _, content in files]


@given(FILES, st.data())
def test_any_other_byte_outside_the_contents_is_refused(files: list[tuple[str, bytes]], choose: st.DataObject) -> None:
    data = bytearray(archive(files))
    at = choose.draw(st.integers(0, len(data) - 1))
    data[at] ^= choose.draw(st.integers(1, 255))
    try:
        found = read(bytes(data), files)
    except ArtifactError:
        return
    assert found != [content for _, content in files]


@given(FILES, st.data())
def test_an_archive_that_is_cut_or_goes_on_is_refused(files: list[tuple[str, bytes]], choose: st.DataObject) -> None:
    data = archive(files)
    with pytest.raises(ArtifactError, match="ends early"):
        read(data[: choose.draw(st.integers(0, len(data) - 1))], files)
    with pytest.raises(ArtifactError, match="more follows"):
        read(data + b"\0", files)


def test_the_bytes_never_change() -> None:
    expected = "sha256:2b2dcb2dc8bd97e033210960e3fe2fe7aad9e4001aa62ddab73bcf2cff01d802"
    assert digest_bytes(archive([("blobs/sha256/ab", b"content")], ("blobs/", "blobs/sha256/"))) == expected


@pytest.mark.parametrize("size", [(8 << 30) - 1, 8 << 30, 10**12, (1 << 50) - 7])
def test_a_file_of_more_than_8_gib_has_a_size_that_tools_read(size: int) -> None:
    head = tar.head(Member("blobs/sha256/ab", size))
    assert len(head) == (512 if size < 8 << 30 else 1536)
    with tarfile.open(fileobj=io.BytesIO(head)) as opened:
        first = opened.next()
    assert first is not None and (first.name, first.size, first.isreg()) == ("blobs/sha256/ab", size, True)


@pytest.mark.parametrize("content", [b"1234", b"123456"])
def test_a_file_that_changes_while_it_is_written_is_an_error(content: bytes) -> None:
    with pytest.raises(ArtifactError, match="changed"):
        list(tar.write((), [(Member("a", 5), [content])]))


def facts(data: bytes, limit: int = 1000) -> dict[str, bytes]:
    return Reader([data], "test").small_files(("manifest.json", "signature.json"), limit)


def test_the_files_of_the_last_layer_are_found_by_name() -> None:
    assert facts(archive([("manifest.json", b"{}")])) == {"manifest.json": b"{}"}
    both = [("manifest.json", b"{}"), ("signature.json", b"s")]
    assert facts(archive(both)) == dict(both)
    assert facts(archive([])) == {}


@pytest.mark.parametrize(
    "files",
    [
        [("other", b"")],
        [("../manifest.json", b"{}")],
        [("/manifest.json", b"{}")],
        [("manifest.json", b"{}"), ("manifest.json", b"{}")],
        [("signature.json", b"s"), ("manifest.json", b"{}")],
        [("manifest.json", b"x" * 1001)],
    ],
)
def test_the_last_layer_holds_nothing_else(files: list[tuple[str, bytes]]) -> None:
    with pytest.raises(ArtifactError, match="not a layer of a bundle"):
        facts(archive(files))


@given(st.integers(0, 511), st.integers(1, 255))
def test_any_other_byte_in_a_header_of_the_last_layer_is_refused(at: int, change: int) -> None:
    data = bytearray(archive([("manifest.json", b"{}")]))
    data[at] ^= change
    with pytest.raises(ArtifactError, match="not a layer of a bundle"):
        facts(bytes(data))


@given(st.binary(max_size=3000))
def test_reading_anything_at_all_raises_nothing_but_artifact_error(data: bytes) -> None:
    with suppress(ArtifactError):
        facts(data)


@given(
    st.text(
        st.characters(codec="utf-8", exclude_characters="/\0\n", exclude_categories=["C"]), min_size=1, max_size=150
    )
)
def test_a_name_of_any_length_and_letters_is_read_by_tools_and_back(name: str) -> None:
    folder = name + "/"
    data = b"".join(tar.write((folder,), [(Member(folder + name, 3, 0o755), [b"abc"])], 0o755))
    assert len(data) == tar.archive_size((folder,), [Member(folder + name, 3, 0o755)])
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        first, second = opened.getmembers()
        assert (first.name, first.isdir(), first.mode) == (name, True, 0o755)
        assert (second.name, second.isreg(), second.mode, second.size) == (folder + name, True, 0o755, 3)
    reader = Reader([data], "test")
    reader.folders((folder,), 0o755)
    assert b"".join(reader.file(Member(folder + name, 3, 0o755))) == b"abc"
    reader.end()
