"""What monitors saw before a run was ready, and since; nothing unknown is 0."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from llmc.runtime.certificate.monitors import Account, LateJaxMonitor, Watch, process_monitors
from llmc.runtime.executors.compilations import Monitor
from llmc.runtime.executors.xla import client
from llmc.settings import Settings


class Reported(Monitor):
    """Says what a test has it see."""

    def __init__(self, name: str = "told") -> None:
        self.name = name
        self.seen: list[str] = []
        self.reason = ""
        self.looks = False

    def start(self) -> None:
        self.looks = True

    def stop(self) -> None:
        self.looks = False

    def what(self) -> Sequence[str]:
        return tuple(self.seen)

    def blind(self) -> str:
        return self.reason


class Number(Reported):
    """Knows how many, and not which."""

    number = 0

    def count(self) -> int | None:
        return self.number


def test_before_and_after_are_reported_apart() -> None:
    reported = Reported()
    with Watch([reported]) as watch:
        assert reported.looks
        reported.seen.append("at open")
        watch.ready()
        reported.seen += ["late", "later"]
        assert watch.accounts() == [Account("told", 1, 2, ("at open",), ("late", "later"))]
    assert not reported.looks


def test_a_monitor_may_know_a_number_alone() -> None:
    number = Number()
    number.number = 3
    with Watch([number]) as watch:
        watch.ready()
        number.number = 5
        assert watch.accounts() == [Account("told", 3, 2)]


def test_blindness_is_unknown_and_what_was_seen_all_the_same_is_known() -> None:
    reported = Reported()
    reported.reason = "no counter here"
    with Watch([reported]) as watch:
        watch.ready()
        assert watch.accounts() == [Account("told", None, None, blind="no counter here")]
        reported.seen.append("late")
        assert watch.accounts() == [Account("told", None, 1, (), ("late",), "no counter here")]


def test_an_executors_monitor_takes_the_place_of_one_of_its_name() -> None:
    general, own = Reported(), Reported()
    with Watch([general, Reported("other")]) as watch:
        watch.add([own])
        assert not general.looks
        watch.ready()
        own.seen.append("late")
        assert [t.after for t in watch.accounts()] == [0, 1]


def test_nobody_is_requested_before_it_is_ready() -> None:
    with Watch([Reported()]) as watch, pytest.raises(RuntimeError, match="ready"):
        watch.accounts()


def test_the_whole_process_is_watched_for_every_device() -> None:
    names = {monitor.name for monitor in process_monitors(Settings.from_environment(), "fake")}
    assert names == {
        "files in compile caches", "torch.compile counters", "JAX compile events",
    }  # fmt: skip


def test_jax_that_comes_in_the_middle_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_listens", False)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monitor = LateJaxMonitor()
    monitor.start()
    assert monitor.count() == 0, "what is not imported compiles nothing"
    monkeypatch.setitem(sys.modules, "jax", sys)
    assert monitor.count() is None
    assert "in the middle" in monitor.blind()


def test_jax_beside_another_executor_is_heard() -> None:
    import jax
    import numpy as np

    monitor = LateJaxMonitor()
    monitor.start()
    jax.jit(lambda x: x + 3)(np.ones(7))
    assert list(monitor.what()) == ["jax: jit(<lambda>)"]
    assert monitor.blind() == ""
