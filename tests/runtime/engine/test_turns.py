"""Two engines that take turns: one at a time, neither starved, and none kept by one that hangs."""

from __future__ import annotations

import threading
import time
from itertools import groupby

import pytest

from llmc.runtime.engine import turns
from llmc.runtime.engine.turns import Turns


def run(shared: Turns, name: str, steps: int, log: list[str]) -> threading.Thread:
    def work() -> None:
        for _ in range(steps):
            with shared.one():
                log.append(f"{name} begins")
                time.sleep(0.002)
                log.append(f"{name} ends")

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_one_at_a_time_and_one_after_the_other() -> None:
    shared, log, steps = Turns(), list[str](), 20
    for thread in [run(shared, name, steps, log) for name in ("old", "new")]:
        thread.join()
    assert len(log) == 2 * 2 * steps
    assert all(begins.split()[0] == ends.split()[0] for begins, ends in zip(log[::2], log[1::2], strict=True))
    who = [line.split()[0] for line in log[::2]]
    assert max(len(list(streak)) for _, streak in groupby(who)) < steps // 2, who


def test_a_step_that_hangs_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE_S", 0.05)
    shared, log, over = Turns(), list[str](), threading.Event()

    def hang() -> None:
        with shared.one():
            over.wait(30)

    hanging = threading.Thread(target=hang)
    hanging.start()
    run(shared, "new", 3, log).join(10)
    assert log == ["new begins", "new ends"] * 3
    over.set()
    hanging.join()
    run(shared, "old", 1, log).join(10)
    assert log[-1] == "old ends"
