from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.digest import digest_bytes, digest_file, is_digest, parse

EMPTY = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_digest_is_sha256_with_its_name() -> None:
    assert digest_bytes(b"") == EMPTY
    assert digest_bytes(memoryview(b"abc")) == "sha256:" + hashlib.sha256(b"abc").hexdigest()


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (3 << 20) + 5])
def test_a_file_has_the_digest_of_its_content_and_progress_adds_up(tmp_path: Path, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    (tmp_path / "file").write_bytes(data[:size])
    seen: list[int] = []
    assert digest_file(tmp_path / "file") == digest_bytes(data[:size])
    assert digest_file(tmp_path / "file", seen.append) == digest_bytes(data[:size])
    assert sum(seen) == size


def test_parse_gives_the_hex_digits() -> None:
    assert parse(EMPTY) == EMPTY[7:]


@pytest.mark.parametrize(
    "text", ["", "sha256:", EMPTY[7:], EMPTY.upper(), EMPTY + "0", EMPTY[:-1], EMPTY + "\n", " " + EMPTY,
             "md5:" + EMPTY[7:], "sha256:" + "../" * 21 + "x", "sha256:" + "٠" * 64]
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    assert not is_digest(text)
    with pytest.raises(ValueError, match="not a digest"):
        parse(text)


@given(st.one_of(st.text(), st.integers(), st.none(), st.binary()))
def test_is_digest_takes_any_object(value: object) -> None:
    assert not is_digest(value) or parse(str(value)) == str(value)[7:]
