"""Files on disk: whole, and in place of nobody's."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.deploy.writing import write
from llmc.errors import InputError


def test_what_is_there_is_replaced_when_asked_to(tmp_path: Path) -> None:
    write(tmp_path, {"a/b": "1", "c": "2"})
    write(tmp_path, {"a/b": "1", "c": "2"})  # the same again is no replacement
    with pytest.raises(InputError, match=r"/c would be replaced.*--force"):
        write(tmp_path, {"a/b": "1", "c": "3", "d": "4"})
    assert (tmp_path / "c").read_text() == "2" and not (tmp_path / "d").exists()
    write(tmp_path, {"c": "3"}, force=True)
    assert (tmp_path / "c").read_text() == "3"


def test_a_dangling_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "c").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="would be replaced"):
        write(tmp_path, {"c": "3"})
    write(tmp_path, {"c": "3"}, force=True)
    assert not (tmp_path / "elsewhere").exists() and not (tmp_path / "c").is_symlink()


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot make the folder .*file"):
        write(tmp_path / "file", {"a": "1"})
