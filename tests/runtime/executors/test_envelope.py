from __future__ import annotations

import json
import mmap
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.errors import ArtifactError
from llmc.runtime.executors.envelope import MAX_HEADER, VERSION, ExecutableFile, Form, write_envelope

HEADER = {"platform": "cpu", "jax": "0.10.2 0.10.2", "inputs": [{"name": "é", "shape": [1, 2]}]}
SECTIONS = {"native": bytes(range(100)), "export": b"portable"}
FORM = Form(b"LLMCXLA2", "an XLA executable")
MAGIC = FORM.magic
FILE = write_envelope(HEADER, SECTIONS, FORM)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=5,
)
headers = st.dictionaries(st.text().filter(lambda name: name not in {"digest", "sections", "version"}), json_values)
sections = st.dictionaries(st.from_regex(r"[a-z][a-z0-9_.-]{0,9}", fullmatch=True), st.binary(max_size=300), max_size=4)


def framed(header: bytes, rest: bytes = b"", magic: bytes = MAGIC) -> bytes:
    return magic + len(header).to_bytes(8, "little") + header + rest


def forged(members: dict[str, Any], rest: bytes = b"") -> bytes:
    """A file whose header is well formed down to its digest."""
    return framed(canonical_json({**members, "digest": digest_bytes(canonical_json(members))}), rest)


def problem(data: bytes) -> str:
    with pytest.raises(ArtifactError) as caught:
        ExecutableFile.parse(data, "decode.xla", FORM)
    assert str(caught.value).startswith("decode.xla: ")
    assert "compile it again" in str(caught.value)
    return str(caught.value)


@given(headers, sections)
def test_what_was_written_is_read(header: dict[str, Any], sections: dict[str, bytes]) -> None:
    found = ExecutableFile.parse(write_envelope(header, sections, FORM), "a file", FORM)
    assert found.header == header
    assert {name: bytes(found.section(name)) for name in found.names} == sections


def test_equal_arguments_give_equal_bytes_in_whatever_order() -> None:
    assert write_envelope(dict(reversed(HEADER.items())), dict(reversed(SECTIONS.items())), FORM) == FILE


def test_the_format_is_what_the_grammar_says() -> None:
    assert FILE[:8] == b"LLMCXLA2"
    length = int.from_bytes(FILE[8:16], "little")
    header = json.loads(FILE[16 : 16 + length])
    assert header["version"] == VERSION == 1
    assert header["platform"] == "cpu"
    assert list(header["sections"]) == ["export", "native"], "in the order of their names"
    for name, (offset, size) in header["sections"].items():
        assert offset % 64 == 0
        assert FILE[offset : offset + size] == SECTIONS[name]
    assert not any(FILE[16 + length : header["sections"]["export"][0]])
    assert sum(header["sections"]["native"]) == len(FILE)


def test_sections_are_used_where_they_lie(tmp_path: Path) -> None:
    path = tmp_path / "decode.xla"
    path.write_bytes(FILE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        envelope = ExecutableFile.parse(mapped, str(path), FORM)
        section = envelope.section("native")
        assert section.obj is mapped
        assert bytes(section) == SECTIONS["native"]
        section.release()
        del envelope, section
    writable = bytearray(FILE)
    assert ExecutableFile.parse(writable, "memory", FORM).section("native").readonly
    assert ExecutableFile.parse(memoryview(FILE), "memory", FORM).section("native").obj is FILE


def test_a_section_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ArtifactError, match=r"^decode\.xla: no section 'code'; it has export, native; compile"):
        ExecutableFile.parse(FILE, "decode.xla", FORM).section("code")


@pytest.mark.parametrize("name", ["digest", "sections", "version"])
def test_members_of_the_format_are_not_the_writers_to_set(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        write_envelope({name: 1}, {}, FORM)


@pytest.mark.parametrize("name", ["", "a b", "../up", "Native", "a" * 65])
def test_a_section_has_a_plain_name(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a section"):
        write_envelope({}, {name: b""}, FORM)


def test_a_header_that_is_too_large_is_not_written() -> None:
    with pytest.raises(ValueError, match="more than"):
        write_envelope({"a": "x" * MAX_HEADER}, {}, FORM)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "not an XLA executable"),
        (b"PK\x03\x04 an archive", "not an XLA executable"),
        (b"LLMCXLA3" + FILE[8:], "LLMCXLA3', which a newer llmc wrote; upgrade llmc"),
        (b"LLMCXLA1" + FILE[8:], "LLMCXLA1', which an older llmc wrote"),
        (forged({"version": 2, "sections": "elsewhere"}), "format version 2, which a newer llmc wrote; upgrade llmc"),
        (forged({"version": 0, "sections": {}}), "version 0 of the format is not one that llmc ever wrote"),
        (forged({"version": True, "sections": {}}), "version True of the format"),
        (forged({"sections": {}}), "version None of the format"),
        (FILE[:8], "a header of 0 bytes|header is not JSON"),
        (FILE[:100], "damaged: a header of"),
        (MAGIC + b"\xff" * 8 + FILE[16:], "damaged: a header of 18446744073709551615 bytes"),
        (framed(b"[1]"), "not a JSON object"),
        (framed(b'{"a":1,"a":1}'), "a member occurs twice"),
        (framed(b'{"a":NaN}'), "NaN is not a JSON number"),
        (framed(b'{"a":1e999}'), "1e999 is out of range"),
        (framed(b'{"a":' + b"[" * 100_000), "nested too deeply"),
        (framed(b"\xff\xfe"), "header is not JSON"),
        (framed(b'{"sections":{},"version":1}'), "its header is not what was written"),
        (framed(b" " + FILE[16 : 16 + FILE[8]]), "header is not"),
        (FILE[:-1], "damaged: it has"),
        (FILE + b"\0", "damaged: it has"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(data: bytes, expected: str) -> None:
    assert re.search(expected, problem(data))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (None, "'sections' must be"),
        ([], "'sections' must be"),
        ({"native": 3}, "'sections' must be"),
        ({"native": [192]}, "'sections' must be"),
        ({"native": [192, -1]}, "'sections' must be"),
        ({"native": [192, True]}, "'sections' must be"),
        ({"native": [192, 1 << 63]}, "'sections' must be"),
        ({"../native": [192, 1]}, "'sections' must be"),
        ({"native": [193, 7]}, "begins at 193 by the header, but must begin at 192"),
        ({"native": [128, 64]}, "begins at 128 by the header, but must begin at 192"),
        ({"native": [256, 64]}, "begins at 256 by the header, but must begin at 192"),
        ({"native": [192, 65]}, "it has 256 bytes, its header says 257"),
        ({"native": [192, (1 << 62)]}, ", its header says"),
        ({"a": [192, 64], "b": [192, 64]}, "section 'b' begins at 192 by the header, but must begin at 256"),
    ],
)
def test_a_section_lies_in_its_place_or_the_file_is_refused(sections: Any, expected: str) -> None:
    members = {"version": 1, "sections": sections}
    start = len(forged(members))
    assert start <= 192
    assert expected in problem(forged(members, bytes(256 - start)))


def test_what_lies_between_sections_is_nothing() -> None:
    index = json.loads(FILE[16 : 16 + FILE[8]])["sections"]["native"][0]
    changed = bytearray(FILE)
    changed[index - 1] = 1
    assert "there are bytes before section 'native'" in problem(bytes(changed))


@given(st.binary(max_size=200), st.sampled_from([b"", MAGIC, framed(b"")[:8] + (50).to_bytes(8, "little")]))
def test_arbitrary_bytes_are_an_artifact_error(data: bytes, start: bytes) -> None:
    problem(start + data)


@given(st.integers(0, len(FILE) - 1))
def test_a_truncated_file_is_an_artifact_error(length: int) -> None:
    problem(FILE[:length])


def test_no_flipped_bit_makes_another_header() -> None:
    start = len(FILE) - len(SECTIONS["native"])
    for bit in range(8 * len(FILE)):
        changed = bytearray(FILE)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            found = ExecutableFile.parse(bytes(changed), "a file", FORM)
        except ArtifactError:
            continue
        assert found.header == HEADER
        assert {name: len(found.section(name)) for name in found.names} == {"export": 8, "native": 100}
        assert bit // 8 >= start or found.section("export") != SECTIONS["export"], "only what is in a section"


def test_a_length_that_is_only_claimed_takes_no_memory() -> None:
    claims = [
        MAGIC + (MAX_HEADER - 1).to_bytes(8, "little") + bytes(1000),
        MAGIC + (1 << 62).to_bytes(8, "little") + bytes(1000),
        forged({"version": 1, "sections": {"native": [192, 1 << 62]}}),
    ]
    tracemalloc.start()
    try:
        for data in claims:
            problem(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
