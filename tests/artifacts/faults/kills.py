"""Kills a process at its system calls, one after the other, and looks at what is left.

    kills.main(SCENARIO, FOLDER)        prints {"calls": n, "leftovers": n} as JSON

Each victim is a fork of this small process. Its calls are seen by an audit hook (open, rename, mkdir, remove, link,
utime, chmod, flock, listdir …) and by wrappers where Python has no audit event (write, fsync, close); it is killed
just before the n-th. After each kill the scenario's `check` runs in another fork: what was published before is
there, the next run succeeds and the one after it is a hit.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import filelock

from llmc.artifacts.bundle import reader as bundle
from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import add_bundle, checkout
from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.digest import Blob
from llmc.artifacts.store import blobs
from llmc.artifacts.store.audit import DEAD_SECONDS, Remover, sweep
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Workspace
from tests.artifacts.helpers import CONTENT, DIGESTS, files_below, flip, key, manifest, sources

AUDITED = {
    *("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link"),
    *("os.chmod", "os.utime", "os.listdir", "os.scandir", "fcntl.flock"),
}
LOADED_BEFORE_THE_FORKS = (ctypes, filelock, logging, tempfile)
WRAPPED = ("write", "fsync", "close")
TOO_LONG = 20
CONTENTS = {"graph": b"graph" * 4000, "notes": b"notes", "stream": b"stream" * 3000}
FIRST = key(batch=1)


def die_at(countdown: int) -> None:
    """Kill this process just before its system call number `countdown`."""

    def tick() -> None:
        nonlocal countdown
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        countdown -= 1

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            tick()
            return call(*arguments, **named)

        return counted

    for name in WRAPPED:
        setattr(os, name, wrap(getattr(os, name)))
    sys.addaudithook(lambda event, _: tick() if event in AUDITED else None)


def forked(work: Callable[[], object], *, countdown: int | None = None) -> int:
    """Run `work` in a fork; the wait status. A fork that hangs is ended by SIGALRM."""
    child = os.fork()
    if child == 0:
        signal.alarm(TOO_LONG)
        try:
            if countdown is not None:
                die_at(countdown)
            work()
        except BaseException:  # noqa: BLE001 - whatever it is, the fork must not go on as if it were the parent
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def build(space: Workspace) -> dict[str, Blob]:
    """A build that stores in each of the three ways."""
    path = space.folder / "graph"
    path.write_bytes(CONTENTS["graph"])
    with space.writer() as stream:
        stream.write(CONTENTS["stream"])
    assert stream.blob is not None
    return {"graph": space.put_file(path), "notes": space.put_bytes(CONTENTS["notes"]), "stream": stream.blob}


def require_whole(store: Store) -> None:
    """The entry that was there before anything happened is there, and right."""
    entry = store.lookup(FIRST, verify=True)
    assert entry is not None
    assert store.get_bytes(entry.outputs["first"].digest) == b"first"


def start(root: Path) -> None:
    """A store with one entry in it."""
    store = Store(root)
    store.publish(FIRST, {"first": store.put_bytes(b"first")})


def run(root: Path) -> None:
    """Build a second entry, or find it."""
    Store(root).get_or_build(key(), build)


def heals(root: Path) -> None:
    """The wedge test: a run in a new process is right, and the one after it is a hit."""
    store = Store(root)
    require_whole(store)
    for hit in (None, True):
        entry, found = Store(root).get_or_build(key(), build)
        assert hit is None or found is hit
        for name, content in CONTENTS.items():
            assert store.get_bytes(entry.outputs[name].digest) == content
    assert store.verify().bad == []


def start_damaged(root: Path) -> None:
    start(root)
    run(root)
    store = Store(root)
    entry = store.lookup(key())
    assert entry is not None
    flip(store.path(entry.outputs["graph"]))


def start_built(root: Path) -> None:
    start(root)
    run(root)


def replace(root: Path) -> None:
    store = Store(root)
    store.publish(key(), {"graph": store.put_bytes(b"new")}, {"new": True})


def is_old_or_new(root: Path) -> None:
    store = Store(root)
    require_whole(store)
    entry = store.lookup(key(), verify=True)
    assert entry is not None
    assert store.get_bytes(entry.outputs["graph"].digest) == (b"new" if entry.meta else CONTENTS["graph"])
    replace(root)
    assert store.verify().bad == []


def stamp(root: Path) -> None:
    """Verify, and save the table of what was verified."""
    blobs.SAVE_STAMPS_FROM = bundle.SAVE_STAMPS_FROM = 0
    time.sleep(0.03)
    run(root)


def old_manifest() -> Manifest:
    blobs_of_old = {DIGESTS[name]: len(CONTENT[name]) for name in ("weights", "prefill")}
    return manifest(executables=[], files={"weights.bin": DIGESTS["weights"]}, blobs=blobs_of_old)


def start_bundle(root: Path) -> None:
    write_bundle(root / "bundle", old_manifest(), sources(root / "sources"))


def write(root: Path) -> None:
    write_bundle(root / "bundle", manifest(), sources(root / "sources"))


def is_whole_bundle(root: Path) -> None:
    with BundleFiles.open(root / "bundle") as files:
        assert files.manifest in (old_manifest(), manifest())
        assert files.verify() == []
    write(root)
    assert BundleFiles.open(root / "bundle").manifest == manifest()
    left = [path.name for path in root.iterdir() if path.name not in ("bundle", "sources")]
    assert left == [], "what the killed writer left is swept by the next one"


def add(root: Path) -> None:
    store = Store(root / "store")
    with BundleFiles.open(root / "bundle") as files:
        checkout(store, add_bundle(store, files))


def is_added(root: Path) -> None:
    store = Store(root / "store")
    for entry in store.entries():
        assert store.lookup(entry.key, verify=True) is not None
    with BundleFiles.open(root / "bundle") as files:
        folder = checkout(store, add_bundle(store, files))
    assert BundleFiles.open(folder).verify() == []
    assert store.verify().bad == []


class Scenario(NamedTuple):
    """What is there before, what the victim does, what must be so afterwards, and which calls are hit: every n-th."""

    prepare: Callable[[Path], None]
    act: Callable[[Path], None]
    check: Callable[[Path], None]
    stride: int = 1


SCENARIOS = {
    "build": Scenario(start, run, heals, stride=2),
    "heal a damaged blob": Scenario(start_damaged, run, heals, stride=3),
    "replace an entry": Scenario(start_built, replace, is_old_or_new),
    "save stamps": Scenario(start_built, stamp, heals, stride=2),
    "write a bundle": Scenario(start_bundle, write, is_whole_bundle, stride=2),
    "add a bundle": Scenario(start_bundle, add, is_added, stride=5),
}


def leftovers(root: Path) -> int:
    """How many temporaries a sweep leaves once they are old."""
    count = 0
    for folder in {path.parent for path in root.rglob("v1") if path.is_dir()}:
        layout = Store(folder).layout
        sweep(layout, Remover(), time.time() + DEAD_SECONDS + 1)
        count += len(files_below(layout.temporaries))
    return count


def main(name: str, folder: Path) -> None:
    prepare, act, check, stride = SCENARIOS[name]
    os.fsync = os.fstat  # type: ignore[assignment]  # what a killed process wrote stays, waited for or not
    calls = left = 0
    prepare(folder / "before")
    while True:
        root = folder / str(calls)
        shutil.copytree(folder / "before", root, symlinks=True)
        status = forked(lambda root=root: act(root), countdown=calls)  # type: ignore[misc]
        if forked(lambda root=root: check(root)):  # type: ignore[misc]
            raise SystemExit(f"{name}: wrong, lost or wedged after a kill at call {calls}")
        left += leftovers(root)
        shutil.rmtree(root)
        if status == 0:
            break
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise SystemExit(f"{name}: the victim of call {calls} ended by itself with {status}")
        calls += stride
    print(json.dumps({"calls": calls, "leftovers": left}))
