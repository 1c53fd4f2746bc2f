"""Files of tuning results: what is written is read, whatever else is refused with one sort of error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.compiler.targets import tuning
from llmc.compiler.targets.tuning import Results, parse_results, read_results, write_results
from llmc.errors import ArtifactError, InputError

H100 = {"gpu": "NVIDIA H100 80GB HBM3", "compiler": "0.10.2"}
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
RESULTS = st.builds(
    Results, st.dictionaries(TEXT, TEXT, max_size=3), st.dictionaries(TEXT, st.binary(max_size=20), max_size=4)
)


def altered(**members: object) -> bytes:
    """A file with other members, and the digest of these."""
    body = {**json.loads(write_results(Results(H100, {"a": b"1"}))), **members}
    del body["digest"]
    return canonical_json({**body, "digest": digest_bytes(canonical_json(body))})


@given(RESULTS)
def test_what_is_written_is_read(results: Results) -> None:
    assert parse_results(write_results(results), "file") == results


@given(RESULTS, st.data())
def test_a_torn_file_is_refused(results: Results, data: st.DataObject) -> None:
    whole = write_results(results)
    with pytest.raises(ArtifactError, match=r"^file: .*; create it again with llmc tune$"):
        parse_results(whole[: data.draw(st.integers(0, len(whole) - 1))], "file")


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ArtifactError):
        parse_results(data, "file")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (altered(version=2), "version 2 of the format, where this llmc reads version 1"),
        (altered(version=True), "version True of the format"),
        (altered(format="plan"), "not results of llmc tune"),
        (altered(more=1), "damaged: it is not what was written"),
        (altered(built_for={"gpu": 1}), "'built_for' and 'results' must be"),
        (altered(results=["a"]), "'built_for' and 'results' must be"),
        (altered(results={"a": "!"}), "a result is not base64"),
        (write_results(Results(H100, {"a": b"1"})).replace(b'"MQ=="', b'"Mg=="'), "damaged: it is not what was"),
        (b'{"format": "llmc tuning results", "version": 1, "a": "\\ud800"}', "damaged: it is not what was written"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, problem: str) -> None:
    with pytest.raises(ArtifactError, match=problem):
        parse_results(data, "file")


def test_a_huge_file_is_refused_before_it_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MAX_BYTES", 1 << 20)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ArtifactError, match="larger than 1 MiB"):
        read_results(tmp_path / "huge")


@pytest.mark.parametrize("name", ["none", "."])
def test_what_is_no_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="name a file that llmc tune wrote"):
        read_results(tmp_path / name)


def test_of_two_results_for_a_matmul_the_newer_counts() -> None:
    older, newer = Results(H100, {"a": b"1", "b": b"1"}), Results(H100, {"b": b"2", "c": b"2"})
    assert older.merged(newer) == Results(H100, {"a": b"1", "b": b"2", "c": b"2"})


def test_results_of_two_gpus_are_not_merged() -> None:
    with pytest.raises(ArtifactError, match="gpu NVIDIA H100 80GB HBM3, not NVIDIA L4; keep a file for each"):
        Results(H100).merged(Results({**H100, "gpu": "NVIDIA L4"}))
