"""Work beside requests: it rests while they run, and its threads serve at the usual priority afterwards."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmc.server import swapping
from llmc.server.swapping import Pace, low_priority


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the module, which goes on as it sleeps; tests move it by appending."""
    passed = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: sum(passed))
    monkeypatch.setattr(time, "sleep", passed.append)
    return passed


def test_rests_are_as_long_as_the_work_requests(slept: list[float]) -> None:
    pace = Pace(lambda: True)
    slept.append(0.5)
    pace.rest()
    assert sum(slept) == pytest.approx(0.5 * (1 + swapping.REST))
    pace.rest()
    assert sum(slept) == pytest.approx(0.5 * (1 + swapping.REST)), "rest is no work"
    slept.append(1000)
    pace.rest()
    assert sum(slept) == pytest.approx(0.5 * (1 + swapping.REST) + 1000 + swapping.LONGEST_REST_S)


def test_it_rests_only_while_there_are_requests(slept: list[float]) -> None:
    pace = Pace(lambda: sum(slept) < 1.3)
    slept.append(1.0)
    pace.rest()
    assert sum(slept) == pytest.approx(1.3, abs=0.05)


def niceness(task: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, task)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="niceness is a thread's own on Linux alone")
def test_what_the_work_started_goes_on_at_the_usual_priority() -> None:
    """Threads, and threads of child processes."""
    import subprocess

    usual, go = niceness(0), threading.Event()
    found: dict[str, int] = {}

    @low_priority()
    def work() -> tuple[int, subprocess.Popen[bytes]]:
        found["worker"] = niceness(threading.get_native_id())
        thread = threading.Thread(target=go.wait, args=(30,))
        thread.start()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
        found["child"] = niceness(child.pid)
        assert thread.native_id is not None
        return thread.native_id, child

    with ThreadPoolExecutor(1) as pool:
        thread, child = pool.submit(work).result()
        if found["worker"] == usual:
            go.set()
            child.kill()
            child.wait()
            pytest.skip("this process may not take a lower niceness back")
        lowered = min(usual + swapping.LOWER, swapping.NICEST)
        assert found == {"worker": lowered, "child": lowered}
        assert (niceness(thread), niceness(child.pid)) == (usual, usual)
        go.set()
        child.kill()
        child.wait()
    assert niceness(0) == usual


def test_without_the_right_to_return_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    with low_priority():
        assert niceness(0) == os.getpriority(os.PRIO_PROCESS, os.getpid())
