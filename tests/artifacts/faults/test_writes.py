"""What is stored is what its name says, even when the source changes while it is read or afterwards (P2)."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.store.store import Store

OLD, NEW = b"old content" * 100, b"new content" * 100


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(OLD)
    return path


@pytest.mark.parametrize("move", [False, True])
def test_a_source_that_changes_after_it_was_hashed(
    store: Store, source: Path, monkeypatch: pytest.MonkeyPatch, move: bool
) -> None:
    real = hashlib.file_digest

    def hash_then_change(*arguments: Any) -> Any:
        found = real(*arguments)
        source.write_bytes(NEW)
        os.utime(source, ns=(1, 1))
        return found

    monkeypatch.setattr(hashlib, "file_digest", hash_then_change)
    blob = store.put_file(source, move=move)
    monkeypatch.undo()
    assert blob.digest in (digest_bytes(OLD), digest_bytes(NEW))
    assert digest_bytes(store.get_bytes(blob.digest)) == blob.digest
    assert store.verify().bad == []
    assert source.exists() is not move


@pytest.mark.parametrize("how", [{}, {"move": True}, {"link": True}])
def test_a_source_that_changes_when_it_was_stored(store: Store, source: Path, how: dict[str, bool]) -> None:
    other = source.with_name("another name of it")
    os.link(source, other)
    blob = store.put_file(source, **how)
    other.write_bytes(NEW)
    assert store.get_bytes(blob.digest) == OLD
    assert store.verify().bad == []


def test_a_source_that_nobody_may_write_is_linked(store: Store, source: Path) -> None:
    source.chmod(0o444)
    blob = store.put_file(source, link=True)
    assert store.path(blob).samefile(source)
