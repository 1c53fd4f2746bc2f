"""Children: each job within its limits, each that goes beyond stopped alone, and none left behind."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmc.errors import InputError, OverloadedError
from llmc.runtime.confined.limits import ChildLimits
from llmc.runtime.confined.pool import ChildPool, JobError, LimitError, _Child
from tests.artifacts.helpers import REPO
from tests.timing import PATIENCE_S, until

LIMITS = ChildLimits(seconds=0.3, memory_bytes=64 << 20, stack_bytes=1 << 20, workers=2, waiting=2)
WORK = "tests.runtime.confined.work:open_work"


@pytest.fixture(scope="module")
def pool() -> Iterator[ChildPool]:
    built = ChildPool(WORK, {"greeting": "hello"}, LIMITS)
    yield built
    built.close()


def family(pool: ChildPool) -> list[psutil.Process]:
    """The nursery and its children."""
    nursery = psutil.Process(pool.pid)
    return [nursery, *nursery.children(recursive=True)]


def test_a_job_gets_and_gives_json(pool):
    job = pool.run(["echo", {"text": "é\ud800", "deep": [[1.5, None, True]]}])
    assert job.value[:2] == ["hello", {"text": "é\ud800", "deep": [[1.5, None, True]]}]
    assert job.value[2] not in (os.getpid(), pool.pid)


def test_a_package_that_a_hook_finds_is_found_in_the_nursery_too(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not (Path(p) / "llmc").exists()])
    built = ChildPool("llmc.runtime.text.confined_chat:open_renderer", {"source": "hi", "special_tokens": {}}, LIMITS)
    try:
        assert built.run({"messages": [{"role": "user", "content": "hello"}]}).value == "hi"
    finally:
        built.close()


def test_a_large_job_is_carried_whole(pool):
    text = "x" * (5 << 20)
    assert pool.run(["echo", text]).value[1] == text


def test_a_child_does_one_job_after_the_other(pool):
    assert pool.run(["echo", 1]).value[2] == pool.run(["echo", 2]).value[2]


@pytest.mark.parametrize(
    ("job", "limit", "message"),
    [
        (["spin"], "time", "more than 0.3 s of processor time"),
        (["memory", 65 << 20], "memory", "more than 64 MiB of memory"),
        (["native memory", 65 << 20], "memory", "more than 64 MiB of memory"),
        (["recursion", 100_000], "stack", "nested or chained too deeply for a stack of 1 MiB"),
        (["signal", signal.SIGSEGV], "stack", "too deeply"),
        (["signal", signal.SIGKILL], "memory", "memory"),
    ],
)
def test_what_goes_beyond_a_limit_is_stopped_and_the_limit_named(pool, job, limit, message):
    with pytest.raises(LimitError, match=message) as caught:
        pool.run(job)
    assert caught.value.limit == limit
    assert pool.run(["echo", 1]).value[:2] == ["hello", 1]


@pytest.mark.parametrize(
    "taken",
    ["signal.signal(signal.SIGPROF, signal.SIG_IGN)", "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})"],
)
def test_time_is_bounded_where_the_parents_libraries_took_the_signal_away(taken: str):
    program = f"""
        import signal
        from llmc.runtime.confined.limits import ChildLimits
        from llmc.runtime.confined.pool import LimitError, ChildPool
        {taken}
        pool = ChildPool("{WORK}", {{"greeting": ""}}, ChildLimits(seconds=0.3))
        try:
            pool.run(["spin"])
        except LimitError as error:
            print(error)
        pool.close()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ran = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, timeout=LIMITS.patience_s / 2)
    assert (ran.stdout, ran.stderr) == ("it takes more than 0.3 s of processor time\n", "")


def test_a_refusal_is_reported_and_a_fault_is_no_refusal(pool):
    with pytest.raises(InputError, match=r"^not this$"):
        pool.run(["refuse", "not this"])
    with pytest.raises(JobError, match="KeyError: 'missing'"):
        pool.run(["fault"])


def test_a_child_that_grew_is_not_used_again():
    pool = ChildPool("tests.runtime.confined.work:open_work", {"greeting": ""}, ChildLimits(memory_bytes=256 << 20))
    try:
        first = pool.run(["echo", 1]).value[2]
        assert pool.run(["keep", 2 << 20]).size >= 1 << 20
        assert pool.run(["echo", 1]).value[2] == first
        assert pool.run(["keep", 40 << 20]).size >= 40 << 20
        assert pool.run(["echo", 1]).value[2] != first
    finally:
        pool.close()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give back what they like")
def test_what_a_job_freed_is_given_back_and_its_child_goes_on():
    pool = ChildPool("tests.runtime.confined.work:open_work", {"greeting": ""}, ChildLimits(memory_bytes=256 << 20))
    try:
        child = psutil.Process(pool.run(["echo", 1]).value[2])
        before = child.memory_info().rss
        assert pool.run(["used", 40 << 20]).size >= 36 << 20
        assert child.memory_info().rss < before + (2 << 20)
        assert pool.run(["echo", 1]).value[2] == child.pid
    finally:
        pool.close()


def test_children_beside_the_first_end_when_there_is_nothing_to_do(tmp_path: Path):
    pool = ChildPool(WORK, {"greeting": ""}, replace(LIMITS, idle_s=0.1))

    async def crowd(go: Path) -> None:
        jobs = [asyncio.ensure_future(pool.arun(["wait for", str(go)], _value)) for _ in range(2)]
        await asyncio.to_thread(until, lambda: len(family(pool)) == 3)
        go.touch()
        await asyncio.gather(*jobs)

    try:
        first = pool.run(["echo", 1]).value[2]
        for turn in range(2):
            asyncio.run(crowd(tmp_path / f"go{turn}"))
            until(lambda: [p.pid for p in family(pool)[1:]] == [first])
        time.sleep(0.3)
        assert pool.run(["echo", 1]).value[2] == first
    finally:
        pool.close()


def test_a_job_whose_child_ends_just_then_goes_to_a_fresh_one(pool, monkeypatch):
    child = pool.run(["echo", 1]).value[2]
    monkeypatch.setattr("llmc.runtime.confined.pool._Child.usable", True)
    os.kill(child, signal.SIGKILL)
    until(lambda: child not in {p.pid for p in family(pool)})
    pool._idle.append(_ended())
    assert pool.run(["echo", 2]).value[1] == 2


def _ended() -> _Child:
    """A child whose other end is closed."""
    ours, theirs = socket.socketpair()
    theirs.close()
    return _Child(ours)


def test_a_nursery_that_was_killed_is_replaced_and_its_children_die_with_it(pool):
    pool.run(["echo", 1])
    before = family(pool)
    assert len(before) > 1
    os.kill(before[0].pid, signal.SIGKILL)
    until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in before))
    assert pool.run(["echo", 2]).value[:2] == ["hello", 2]
    assert pool.pid != before[0].pid


def test_jobs_on_a_loop_run_side_by_side_and_wait_in_turn(pool):
    async def work() -> None:
        running = [asyncio.ensure_future(pool.arun(["sleep", 0.1], _value)) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="2 requests wait for one of 2 child processes"):
            await pool.arun(["echo", 1], _value)
        assert await asyncio.gather(*running) == [None] * 4
        assert (await pool.arun(["echo", 1], _value))[1] == 1

    asyncio.run(work())


def test_cancelling_kills_the_child_and_gives_its_place_on(pool):
    async def work() -> None:
        sleeping = [asyncio.ensure_future(pool.arun(["sleep", 600], _value)) for _ in range(2)]
        waiting = [asyncio.ensure_future(pool.arun(["echo", i], _value)) for i in range(2)]
        await asyncio.to_thread(until, lambda: len(family(pool)) == 3 and len(pool._queue) == 2)
        busy = {p.pid for p in family(pool)[1:]}
        waiting[0].cancel()
        for task in sleeping:
            task.cancel()
        assert (await asyncio.wait_for(waiting[1], PATIENCE_S))[1] == 1
        until(lambda: not busy & {p.pid for p in family(pool)[1:]})
        assert pool._busy == 0 and not pool._queue

    asyncio.run(work())


async def _value(job: Any) -> Any:
    return job.value


def test_threads_may_run_jobs_at_once(pool):
    found: list[Any] = []
    threads = [threading.Thread(target=lambda i=i: found.append(pool.run(["echo", i]).value[1])) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(6))


def test_a_closed_pool_leaves_no_process():
    pool = ChildPool(WORK, {"greeting": ""}, LIMITS)
    pool.run(["echo", 1])
    processes = family(pool)
    pool.close()
    assert not any(p.is_running() for p in processes)
    with pytest.raises(JobError, match="closed"):
        pool.run(["echo", 1])


def test_a_nursery_that_cannot_start_is_an_error_of_ours():
    pool = ChildPool("tests.runtime.confined.work:no_such_thing", {}, LIMITS)
    with pytest.raises(JobError, match="without an answer"):
        pool.run(["echo", 1])
    pool.close()


def test_no_process_remains_when_the_parent_is_killed(tmp_path: Path):
    """With one child idle, and one that computes and looks at no socket."""
    program = f"""
        import os, threading, time
        from llmc.runtime.confined.limits import ChildLimits
        from llmc.runtime.confined.pool import ChildPool
        pool = ChildPool("{WORK}", {{"greeting": ""}}, ChildLimits(seconds=600))
        threading.Thread(target=lambda: pool.run(["spin"]), daemon=True).start()
        pid = pool.run(["echo", 1]).value[2]
        while len(os.listdir("/proc/self/task")) < 2: pass
        print(pool.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], cwd=REPO, stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        nursery = psutil.Process(int(parent.stdout.readline()))
        until(lambda: len(nursery.children()) == 2)
        processes = [nursery, *nursery.children()]
        parent.kill()
    until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes))
