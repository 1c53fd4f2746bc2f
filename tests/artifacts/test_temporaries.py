"""Temporary folders: gone at the end, and what a killed process left is gone with the next."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.artifacts.store.workspace import Spill
from llmc.artifacts.temporaries import Swept, sweep, temporary_folder
from llmc.cli.main import main

HOLD = """
import sys, time
from llmc.artifacts.temporaries import temporary_folder
with temporary_folder("held") as folder:
    (folder / "file").write_bytes(b"0" * 1000)
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def folder_of(holder: subprocess.Popen[str]) -> Path:
    assert holder.stdout is not None
    return Path(holder.stdout.readline().strip())


def test_it_is_this_user_s_alone_and_gone_at_the_end(location: Path) -> None:
    with temporary_folder("mine") as folder:
        assert (folder.parent, stat.S_IMODE(folder.stat().st_mode)) == (location, 0o700)
        (folder / "below").mkdir()
    assert list(location.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda s: s.name)
def test_what_a_killed_process_left_goes_with_the_next_folder(
    location: Path, holder: subprocess.Popen[str], how: signal.Signals
) -> None:
    left = folder_of(holder)
    with temporary_folder("next") as folder:
        assert {left, folder} == set(location.iterdir()), "in use"
    holder.send_signal(how)
    holder.wait()
    assert left.exists()
    with temporary_folder("next") as folder:
        assert set(location.iterdir()) == {folder}


def test_gc_removes_them_and_says_so(
    location: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    holder: subprocess.Popen[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))

    def gc(*flags: str) -> str:
        assert main(["cache", "gc", *flags]) == 0
        return capsys.readouterr().out

    left = folder_of(holder)
    assert "temporary" not in gc()
    holder.kill()
    holder.wait()
    assert "would remove 1 temporary folder of killed processes, 1000 B" in gc("--dry-run")
    assert left.exists()
    assert json.loads(gc("--json"))["temporaries"] == {"folders": 1, "freed": 1000}
    assert not left.exists()
    assert "temporary" not in gc()


def test_a_child_keeps_what_its_parent_built(location: Path) -> None:
    with temporary_folder("parent") as folder:
        child = os.fork()
        if not child:
            time.sleep(600)
            os._exit(0)
        try:
            assert sweep() == Swept()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert not folder.exists()


def test_what_only_has_the_name_stays(location: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (location / "llmc-link.tmp").symlink_to(tmp_path / "elsewhere")
    (location / "llmc-file.tmp").write_text("x")
    (location / "llmc-other").mkdir()
    (location / "other.tmp").mkdir()
    assert sweep() == Swept()
    (location / "llmc-of another.tmp").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 54321)
        assert sweep() == Swept()
    assert len(list(location.iterdir())) == 5
    assert sweep() == Swept(1, 0)


def test_where_locks_mean_nothing_everything_stays(location: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (location / "llmc-left.tmp").mkdir()
    monkeypatch.setattr("llmc.artifacts.flock.flock", lambda fd, **_: None)
    with temporary_folder("mine"):
        assert len(list(location.iterdir())) == 2
    assert [path.name for path in location.iterdir()] == ["llmc-left.tmp"]


def test_one_that_is_swept_before_it_is_locked_is_built_again(location: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, built = tempfile.mkdtemp, []

    def swept_at_once(*names: str) -> str:
        built.append(real(*names))
        if len(built) == 1:
            sweep()
        return built[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", swept_at_once)
    with temporary_folder("mine") as folder:
        assert (len(built), str(folder), list(location.iterdir())) == (2, built[1], [folder])


def test_results_without_room_are_there_as_long_as_they_are_used(location: Path) -> None:
    spill = Spill(None)
    root = spill.take(OSError("full")).layout.root
    assert sweep() == Swept()
    assert list(location.iterdir()) == [root]
    del spill
    assert list(location.iterdir()) == []
