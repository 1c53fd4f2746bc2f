"""Many processes on one store, some of them killed at the worst moment."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import pytest

from llmc.artifacts.digest import Blob
from llmc.artifacts.key import Key
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Workspace
from tests.artifacts.helpers import child, files_below, finish, key
from tests.timing import until

BUILDER = """
    import sys, time, os
    from pathlib import Path
    from llmc.artifacts.store import store as module
    from llmc.artifacts.key import Key
    root, runs, mode, seconds = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    if mode == "unlocked":
        from contextlib import nullcontext
        module.exclusive = lambda *arguments: nullcontext(False)
    def build(space):
        (runs / f"{os.getpid()}").touch()
        (space.folder / "graph").write_bytes(b"g" * 50_000)
        time.sleep(seconds)
        return {"graph": space.put_file(space.folder / "graph"), "notes": space.put_bytes(b"notes")}
    store = module.Store(root)
    print("ready", flush=True)
    while not (runs / "go").exists():
        time.sleep(0.005)
    entry, hit = store.get_or_build(Key("k", {"a": 1}), build)
    assert store.path(entry.outputs["graph"]).read_bytes() == b"g" * 50_000
    print("hit" if hit else "built")
"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def begins(process: subprocess.Popen[str]) -> None:
    """Wait until it is about to build."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def crowd(root: Path, runs: Path, count: int, mode: str) -> list[str]:
    processes = [child(BUILDER, root, runs, mode, 0.3) for _ in range(count)]
    for process in processes:
        begins(process)
    (runs / "go").touch()
    return sorted(finish(process) for process in processes)


def test_eight_processes_that_want_one_key_build_it_once(tmp_path: Path, runs: Path) -> None:
    assert crowd(tmp_path / "store", runs, 8, "locked") == ["built", *["hit"] * 7]
    assert len(list(runs.iterdir())) == 2


def test_without_locks_all_are_right_all_the_same(tmp_path: Path, runs: Path) -> None:
    results = crowd(tmp_path / "store", runs, 4, "unlocked")
    assert set(results) <= {"built", "hit"}
    assert "built" in results
    store = Store(tmp_path / "store")
    assert store.verify().bad == []
    assert store.usage().blobs == 2
    assert files_below(store.root / "v1/tmp") == []


def test_a_lock_dies_with_its_holder(tmp_path: Path, runs: Path) -> None:
    (runs / "go").touch()
    holder = child(BUILDER, tmp_path / "store", runs, "locked", 600)
    until(lambda: len(list(runs.iterdir())) == 2)
    holder.kill()
    holder.communicate()
    next_one = child(BUILDER, tmp_path / "store", runs, "locked", 0)
    begins(next_one)
    assert finish(next_one) == "built"


def test_threads_of_one_process_build_once_too(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    store = Store(tmp_path / "store")
    built: list[int] = []

    def build(space: Workspace) -> dict[str, Blob]:
        built.append(1)
        time.sleep(0.1)
        return {"graph": space.put_bytes(b"graph")}

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: store.get_or_build(key(), build)[1], range(8)))
    assert sorted(results) == [False, *[True] * 7]
    assert len(built) == 1


VICTIM = """
    import itertools, sys
    from llmc.artifacts.store.store import Store
    from llmc.artifacts.key import Key
    store = Store(sys.argv[1])
    print("ready", flush=True)
    for count in itertools.count(int(sys.argv[2])):
        data = f"{count}-".encode() * 20_000
        with store.writer() as stream:
            stream.write(data)
        outputs = {"a": stream.blob, "b": store.put_bytes(data[::-1])}
        store.publish(Key("k", {"count": count}), outputs)
        print(count, flush=True)
"""


def test_kill_9_at_any_moment_leaves_a_sound_store(tmp_path: Path) -> None:
    chance = random.Random(7)
    next_count = 0
    for _ in range(12):
        victim = child(VICTIM, tmp_path / "store", next_count)
        assert victim.stdout is not None
        assert victim.stdout.readline() == "ready\n"
        time.sleep(chance.random() * 0.04)
        victim.kill()
        published = [int(line) for line in victim.communicate()[0].split()]
        store = Store(tmp_path / "store")
        for entry in store.entries():
            assert store.lookup(entry.key, verify=True) is not None
        counts = {entry.key.components["count"] for entry in store.entries()}
        assert counts >= set(published), "what was said to be published is there"
        next_count = max([next_count, *published]) + 1
    store = Store(tmp_path / "store")
    assert store.verify().bad == []
    assert store.counters["corrupt"] == 0


STEPS = """
    import os, signal, sys
    from llmc.artifacts.store.store import Store
    from llmc.artifacts.key import Key
    call, countdown = sys.argv[2], int(sys.argv[3])
    original = getattr(os, call)
    def deadly(*arguments, **named):
        global countdown
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        countdown -= 1
        return original(*arguments, **named)
    setattr(os, call, deadly)
    store = Store(sys.argv[1])
    entry, hit = store.get_or_build(Key("k", {"a": 1}), lambda space: {"a": space.put_bytes(b"a" * 1000)})
    print("survived")
"""


def build_small(space: Workspace) -> dict[str, Blob]:
    return {"a": space.put_bytes(b"a" * 1000)}


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_kill_9_at_each_system_call_is_healed_by_the_next_run(tmp_path: Path, call: str) -> None:
    for countdown in range(0, 60, 3 if call == "fsync" else 1):
        root = tmp_path / f"{call}{countdown}"
        victim = child(STEPS, root, call, countdown)
        survived = victim.communicate()[0].strip() == "survived"
        store = Store(root)
        entry, _ = store.get_or_build(Key("k", {"a": 1}), build_small)
        assert store.get_bytes(entry.outputs["a"].digest) == b"a" * 1000
        assert store.verify().bad == []
        if survived:
            break
    assert survived
    assert countdown > 0


def test_readers_never_see_a_part(tmp_path: Path) -> None:
    """Entries are replaced over and over while others read them."""
    root = tmp_path / "store"
    writers = [child(REWRITER, root, number) for number in range(2)]
    until(lambda: list(root.glob("v1/entries/executable/*")))
    store = Store(root)
    seen = 0
    while any(writer.poll() is None for writer in writers):
        entry = store.lookup(key(), verify=True)
        assert entry is not None
        seen += 1
    for writer in writers:
        finish(writer)
    assert store.counters["corrupt"] == 0
    assert seen > 10


REWRITER = """
    import sys
    from llmc.artifacts.store.store import Store
    from tests.artifacts.helpers import key
    store = Store(sys.argv[1])
    for count in range(60):
        store.publish(key(), {"a": store.put_bytes(f"{sys.argv[2]} {count}".encode() * 99)}, {"count": count})
"""
