"""Collecting while others read and write, and being killed in the midst of it."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from llmc.artifacts.gc import collect
from llmc.artifacts.store.layout import Layout
from llmc.artifacts.store.store import Store
from tests.artifacts.helpers import child, files_below, finish, key
from tests.tiers import full

WORKER = """
    import logging, os, random, sys, time
    from llmc.artifacts.key import Key
    from llmc.artifacts.store.store import Store
    root, role, seed, locks, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], float(sys.argv[5])
    if locks == "without":
        import fcntl
        fcntl.flock = lambda *_: None
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    handler.setLevel(logging.WARNING)
    logging.getLogger("llmc.artifacts").addHandler(handler)
    chance = random.Random(seed)
    def content(number):
        return number.to_bytes(4, "big") * 5000
    def build(number):
        def make(space):
            outputs = {"own": space.put_bytes(content(number)), "shared": space.put_bytes(content(1000 + number % 5))}
            time.sleep(chance.random() * 0.003)
            return outputs
        return make
    done = corrupt = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        store = Store(root)
        for _ in range(chance.randrange(1, 4)):
            number = chance.randrange(30)
            key = Key("k", {"number": number})
            entry = store.get_or_build(key, build(number))[0] if role == "write" else store.lookup(key, verify=True)
            if entry is not None:
                time.sleep(chance.random() * 0.005)
                assert store.path(entry.outputs["own"]).read_bytes() == content(number)
                assert store.get_bytes(entry.outputs["shared"].digest) == content(1000 + number % 5)
                done += 1
        corrupt += store.counters["corrupt"]
    assert not warnings, warnings
    assert corrupt == 0
    print(done)
"""

COLLECTOR = """
    import sys, time
    from llmc.artifacts.gc import collect
    from llmc.artifacts.store.layout import Layout
    root, locks, seconds, grace = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    if locks == "without":
        import fcntl
        fcntl.flock = lambda *_: None
    removed = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = collect(Layout(root), max_size=60_000, grace=grace)
        assert not found.failed, found
        removed += found.entries
    print(removed)
"""


@full
@pytest.mark.parametrize(("locks", "grace"), [("with", 3600.0), ("with", 0.0), ("without", 0.1)])
def test_four_writers_and_two_readers_never_notice(tmp_path: Path, locks: str, grace: float) -> None:
    root = tmp_path / "store"
    roles = ["write"] * 4 + ["read"] * 2
    workers = [child(WORKER, root, role, seed, locks, 1.5) for seed, role in enumerate(roles)]
    collector = child(COLLECTOR, root, locks, 1.5, grace)
    for process in (*workers, collector):
        process.wait(60)
    done = [int(finish(worker)) for worker in workers]
    assert int(finish(collector)) > 0, "it did collect"
    assert all(count > 0 for count in done[:4])
    store = Store(root)
    assert store.verify().bad == []
    assert files_below(root / "v1/quarantine") == []
    assert files_below(root / "v1/leases") == []


LOOP = """
    import sys
    from llmc.artifacts.gc import collect
    from llmc.artifacts.store.layout import Layout
    print("ready", flush=True)
    sys.stdin.readline()
    collect(Layout(sys.argv[1]), max_size=30_000)
"""

STEPS = """
    import os, signal, sys
    from llmc.artifacts.gc import collect
    from llmc.artifacts.store.layout import Layout
    call, countdown = sys.argv[2], int(sys.argv[3])
    original = getattr(os, call)
    def deadly(*arguments, **named):
        global countdown
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        countdown -= 1
        return original(*arguments, **named)
    for start in range(int(sys.argv[4])):
        pid = os.fork()
        if pid == 0:
            countdown = start
            setattr(os, call, deadly)
            collect(Layout(f"{sys.argv[1]}{start}"), max_size=25_000)
            os._exit(0)
        print(os.waitpid(pid, 0)[1])
"""


def fill(root: Path, numbers: range) -> None:
    store = Store(root)
    for number in numbers:
        own = store.put_bytes(number.to_bytes(4, "big") * 2500)
        store.publish(key(number=number), {"own": own, "shared": store.put_bytes(b"shared" * 1000)})


def check(root: Path) -> int:
    """The store is sound; how many entries there are."""
    store = Store(root)
    entries = store.entries()
    for entry in entries:
        assert store.lookup(entry.key, verify=True) is not None
    assert store.verify().bad == []
    assert store.counters["corrupt"] == 0
    return len(entries)


@pytest.mark.parametrize("call", ["rename", "unlink", "open"])
def test_kill_9_at_each_system_call_leaves_a_sound_store(tmp_path: Path, call: str) -> None:
    for start in range(14):
        fill(tmp_path / f"store{start}", range(4))
    ends = finish(child(STEPS, tmp_path / "store", call, 0, 14)).split()
    assert "9" in ends
    for start in range(14):
        root = tmp_path / f"store{start}"
        assert check(root) <= 4
        assert collect(Layout(root), max_size=0, grace=0).after == 0


def test_kill_9_at_any_moment_leaves_a_sound_store(tmp_path: Path) -> None:
    import subprocess
    import sys
    import textwrap

    chance = random.Random(3)
    root = tmp_path / "store"
    for turn in range(8):
        fill(root, range(20 * turn, 20 * turn + 20))
        command = [sys.executable, "-c", textwrap.dedent(LOOP), str(root)]
        victim = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert victim.stdout is not None
        assert victim.stdin is not None
        victim.stdout.readline()
        victim.stdin.write("\n")
        victim.stdin.flush()
        time.sleep(chance.random() * 0.04)
        victim.kill()
        victim.communicate()
        check(root)
    assert collect(Layout(root), max_size=0, grace=0).after == 0
