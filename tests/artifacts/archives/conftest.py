from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.artifacts.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store that has to be as good as empty, and the only thing beside the archive, when the test ends."""
    store = Store(tmp_path / "in" / "store")
    (tmp_path / "in").mkdir()
    yield store
    assert store.entries() == []
    assert store.verify().bad == []
    assert not list(store.layout.temporaries.glob("*"))
    assert {path.name for path in tmp_path.iterdir()} == {"in"}
    assert {path.name for path in (tmp_path / "in").iterdir()} <= {"store", "store.tar"}
