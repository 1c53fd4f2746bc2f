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
from llmc.runtime.executors.xla.envelope import MAGIC, MAX_HEADER, VERSION, Envelope, StepHeader, Tensor, write_envelope

HEADER = {"platform": "cpu", "jax": "0.10.2 0.10.2", "inputs": [{"name": "é", "shape": [1, 2]}]}
SECTIONS = {"native": bytes(range(100)), "export": b"portable"}
FILE = write_envelope(HEADER, SECTIONS)

CACHE = Tensor("keys", (30, 10, 4, 64, 16), "bfloat16", (None, None, "tp", None, None))
STEP = StepHeader(
    platform="tpu", topology="v5e:2x2", devices=4, jax="0.10.2 0.10.2", kind="step",
    inputs=(Tensor("token_ids", (4, 1), "int32", (None, None)), CACHE),
    outputs=(Tensor("logits", (4, 100), "float32", (None, None)), CACHE),
    donated=((1, 1),),
)  # fmt: skip

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
        Envelope.parse(data, "decode.xla")
    assert str(caught.value).startswith("decode.xla: ")
    assert "compile it again" in str(caught.value)
    return str(caught.value)


@given(headers, sections)
def test_what_was_written_is_read(header: dict[str, Any], sections: dict[str, bytes]) -> None:
    found = Envelope.parse(write_envelope(header, sections), "a file")
    assert found.header == header
    assert {name: bytes(found.section(name)) for name in found.names} == sections


def test_equal_arguments_give_equal_bytes_in_whatever_order() -> None:
    assert write_envelope(dict(reversed(HEADER.items())), dict(reversed(SECTIONS.items()))) == FILE


def test_the_format_is_what_the_grammar_says() -> None:
    assert FILE[:8] == b"LLMCXLA1"
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
        envelope = Envelope.parse(mapped, str(path))
        section = envelope.section("native")
        assert section.obj is mapped
        assert bytes(section) == SECTIONS["native"]
        section.release()
        del envelope, section
    writable = bytearray(FILE)
    assert Envelope.parse(writable, "memory").section("native").readonly
    assert Envelope.parse(memoryview(FILE), "memory").section("native").obj is FILE


def test_a_section_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ArtifactError, match=r"^decode\.xla: no section 'code'; it has export, native; compile"):
        Envelope.parse(FILE, "decode.xla").section("code")


@pytest.mark.parametrize("name", ["digest", "sections", "version"])
def test_members_of_the_format_are_not_the_writers_to_set(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        write_envelope({name: 1}, {})


@pytest.mark.parametrize("name", ["", "a b", "../up", "Native", "a" * 65])
def test_a_section_has_a_plain_name(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a section"):
        write_envelope({}, {name: b""})


def test_a_header_that_is_too_large_is_not_written() -> None:
    with pytest.raises(ValueError, match="more than"):
        write_envelope({"a": "x" * MAX_HEADER}, {})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "not an XLA executable"),
        (b"PK\x03\x04 an archive", "not an XLA executable"),
        (b"LLMCXLA2" + FILE[8:], "a newer llmc wrote"),
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
        ({"native": [193, 7]}, "is said to begin at 193, where 192 is its place"),
        ({"native": [128, 64]}, "is said to begin at 128, where 192 is its place"),
        ({"native": [256, 64]}, "is said to begin at 256, where 192 is its place"),
        ({"native": [192, 65]}, "it has 256 bytes, where its header says 257"),
        ({"native": [192, (1 << 62)]}, "where its header says"),
        ({"a": [192, 64], "b": [192, 64]}, "section 'b' is said to begin at 192, where 256 is its place"),
    ],
)
def test_a_section_lies_in_its_place_or_the_file_is_refused(sections: Any, expected: str) -> None:
    members = {"version": 1, "sections": sections}
    start = len(forged(members))
    assert start <= 192
    assert expected in problem(forged(members, bytes(256 - start)))


def test_what_lies_between_sections_is_nothing() -> None:
    place = json.loads(FILE[16 : 16 + FILE[8]])["sections"]["native"][0]
    changed = bytearray(FILE)
    changed[place - 1] = 1
    assert "something lies before section 'native'" in problem(bytes(changed))


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
            found = Envelope.parse(bytes(changed), "a file")
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


def test_the_description_of_a_step_is_read_as_it_was_written() -> None:
    file = write_envelope({**STEP.to_json(), "bucket": [4, 1, 64]}, {})
    assert StepHeader.parse(Envelope.parse(file, "decode.xla").header, "decode.xla") == STEP


TENSOR = {"name": "x", "shape": [8], "dtype": "int32", "dims": [None]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"platform": "rocm"}, "'platform' must be one of cpu, tpu, cuda"),
        ({"platform": ["cpu"]}, "'platform' must be one of"),
        ({"kind": None}, "'kind' must be one of step, slots"),
        ({"topology": 3}, "'topology' must be a string"),
        ({"jax": None}, "'jax' must be a string"),
        ({"devices": 0}, "devices must be an integer from 1"),
        ({"devices": True}, "devices must be an integer"),
        ({"devices": 1.0}, "devices must be an integer"),
        ({"devices": 3}, r"inputs\[1\] has 4 to cut for 3 devices"),
        ({"inputs": {}}, "'inputs' must be a list"),
        ({"outputs": [3]}, r"outputs\[0\] must be an object"),
        ({"inputs": [TENSOR | {"name": ""}]}, r"inputs\[0\]\.name"),
        ({"inputs": [TENSOR | {"dtype": "object"}]}, r"inputs\[0\]\.dtype must be one of float32, bfloat16, int32"),
        ({"inputs": [TENSOR | {"dtype": []}]}, r"inputs\[0\]\.dtype"),
        ({"inputs": [TENSOR | {"shape": 8}]}, r"inputs\[0\]\.shape must be a list"),
        ({"inputs": [TENSOR | {"shape": [-1]}]}, r"inputs\[0\]\.shape must be an integer from 0"),
        ({"inputs": [TENSOR | {"shape": [2**60]}]}, r"inputs\[0\]\.shape must be an integer from 0"),
        ({"inputs": [TENSOR | {"shape": ["8"]}]}, r"inputs\[0\]\.shape must be an integer"),
        ({"inputs": [TENSOR | {"dims": []}]}, r"inputs\[0\] must have a dim for each"),
        ({"inputs": [TENSOR | {"dims": ["dp"]}]}, r"inputs\[0\]\.dims must be null or 'tp'"),
        ({"inputs": [TENSOR | {"shape": [1] * 9, "dims": [None] * 9}]}, "a dim for each of 0 to 8 sizes"),
        ({"inputs": [TENSOR | {"shape": [4, 4], "dims": ["tp", "tp"]}]}, r"inputs\[0\] is cut twice"),
        ({"donated": None}, "'donated' must be a list"),
        ({"donated": [1]}, r"donated\[…\] must be a list"),
        ({"donated": [[1]]}, r"donated\[…\] must be \[output, input\]"),
        ({"donated": [[2, 1]]}, r"donated\[…\] must be \[output, input\], below 2 and 2"),
        ({"donated": [[1, -1]]}, r"donated\[…\] must be \[output, input\], below 2 and 2"),
        ({"donated": [[0, 1]]}, "output 'logits' does not fit where input 'keys' lies"),
        ({"donated": [[1, 1], [1, 1]]}, "'donated' names one tensor twice"),
        ({"outputs": []}, r"donated\[…\] must be \[output, input\], below 0 and 2"),
    ],
)  # fmt: skip
def test_a_description_that_no_executable_has_is_refused(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ArtifactError, match=rf"^decode\.xla: damaged, or not made by llmc: .*{expected}.*compile it"):
        StepHeader.parse({**json.loads(json.dumps(STEP.to_json())), **change}, "decode.xla")


@given(st.sampled_from(sorted(STEP.to_json())), json_values)
def test_any_value_of_a_member_is_read_or_an_artifact_error(name: str, value: Any) -> None:
    try:
        found = StepHeader.parse({**json.loads(json.dumps(STEP.to_json())), name: value}, "decode.xla")
    except ArtifactError:
        return
    assert found.to_json()[name] == (tuple(value) if isinstance(value, list) else value)


@given(json_values)
def test_any_tensor_is_read_or_an_artifact_error(value: Any) -> None:
    members = {**json.loads(json.dumps(STEP.to_json())), "inputs": [value], "donated": []}
    with pytest.raises(ArtifactError):
        StepHeader.parse(members, "decode.xla")
