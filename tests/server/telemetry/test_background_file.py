"""Lines reach the file whole and in order, or are counted as lost; who writes never waits and never hears of it."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from llmc.server.telemetry import requests as recorder
from llmc.server.telemetry.requests import BackgroundFile
from tests.timing import PATIENCE_S


def opened(path: Path) -> BackgroundFile[int]:
    return BackgroundFile[int](path, lambda item: f"{item}\n")


def numbers(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()]


class Disk:
    """Stands before os.write: takes `room` bytes, then fails as a full disk does; a gate holds writes up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: float = float("inf")
        self.most: float = float("inf")
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        write = os.write

        def limited(file: int, data: memoryview) -> int:
            self.reached.set()
            self.gate.wait()
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            took = write(file, data[: int(min(self.room, self.most, len(data)))])
            self.room -= took
            return took

        monkeypatch.setattr(recorder.os, "write", limited)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_short_writes_are_continued(tmp_path: Path, disk: Disk) -> None:
    disk.most = 7
    file = opened(tmp_path / "f")
    for i in range(1000):
        file.put(i)
    file.close()
    assert numbers(tmp_path / "f") == list(range(1000))
    assert file.lost == 0


def test_half_a_write_is_taken_back(tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "f").write_text("7\n")
    disk.room = 3
    file = opened(tmp_path / "f")
    with caplog.at_level(logging.WARNING, "llmc"):
        for i in (100, 200):
            file.put(i)
            file.flush()
        assert numbers(tmp_path / "f") == [7]
        disk.room = float("inf")
        file.put(300)
        file.close()
    assert numbers(tmp_path / "f") == [7, 300]
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot write {tmp_path / 'f'}: No space left on device; entries are lost until there is room",
        f"{tmp_path / 'f'} is written again; 2 entries were lost",
    ]


def test_a_disk_that_hangs_holds_nobody_up(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(recorder, "MAX_PENDING", 100)
    disk.gate.clear()
    file = opened(tmp_path / "f")
    file.put(-1)
    assert disk.reached.wait(PATIENCE_S)
    for i in range(150):
        file.put(i)
    assert file.lost == 50
    assert not file.flush(timeout_s=0.01)
    disk.gate.set()
    file.close()
    assert numbers(tmp_path / "f") == [-1, *range(100)]


def test_nothing_waits_longer_than_the_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk) -> None:
    monkeypatch.setattr(recorder, "PERIOD_S", 0.01)
    file = opened(tmp_path / "f")
    file.put(1)
    assert disk.reached.wait(PATIENCE_S)
    file.close()


def test_what_comes_after_the_end_is_lost_in_silence(tmp_path: Path) -> None:
    file = opened(tmp_path / "f")
    file.close()
    file.put(1)
    assert file.flush()
    assert file.lost == 1
    assert (tmp_path / "f").read_text() == ""
