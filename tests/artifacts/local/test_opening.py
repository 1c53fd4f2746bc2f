"""The user's store, as the settings describe it: what is said when it is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.artifacts.local.opening import _warn_of_writers, open_store
from llmc.settings import Settings


@pytest.fixture(autouse=True)
def _anew() -> None:
    _warn_of_writers.cache_clear()


def opened(root: Path, *shared: Path) -> None:
    open_store(root, Settings(shared_caches=tuple(map(str, shared))))


@pytest.mark.parametrize("below", ["", "v1"])
@pytest.mark.parametrize("tier", ["own", "shared"])
def test_a_store_that_everybody_may_write_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, below: str, tier: str
) -> None:
    root = tmp_path / "store"
    (root / "v1").mkdir(parents=True)
    (root / below).chmod(0o777)
    places = (root,) if tier == "own" else (tmp_path / "mine", root)
    opened(*places)
    opened(*places)
    (message,) = caplog.messages
    assert message.startswith(f"{root / below}: every user of this machine may put results there")
    assert message.endswith(f"chmod o-w {root / below}")


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o1777])
def test_others_are_opened_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int) -> None:
    opened(tmp_path / "not there yet")
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    opened(tmp_path / "store")
    assert caplog.messages == []
