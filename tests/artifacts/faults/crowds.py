"""Many processes on one store at once, all forked from this small one and let go together.

`main` prints {"built": n, "hits": n, "builds": n}: how many said what, and how often the build ran. A fault changes
what the forks see: "no locks" (flock succeeds and does nothing), "clock back" (each fork's clock goes back an hour at
every look), "user U:G" (each fork is another user of group G), "umask M".
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import tempfile
import time
import traceback
from pathlib import Path

import filelock

from llmc.artifacts.digest import Blob
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Workspace
from tests.artifacts.helpers import key

LOADED_BEFORE_THE_FORKS = (filelock, logging, tempfile)
CONTENT = b"g" * 50_000
BUILD_SECONDS = 0.2


def inject(fault: str, number: int) -> None:
    """Make this process see a fault."""
    name, _, value = fault.partition(" ")
    if fault == "no locks":
        fcntl.flock = lambda *_: None  # type: ignore[assignment]
    elif fault == "clock back":
        start, looks = time.time(), iter(range(1 << 30))
        time.time = lambda: start - 3600.0 * next(looks)
        time.time_ns = lambda: int(time.time() * 1e9)
    elif name == "umask":
        os.umask(int(value, 8))
    elif name == "user":
        user, group = map(int, value.split(":"))
        os.setgroups([])
        os.setgid(group)
        os.setuid(user + number)
    else:
        raise ValueError(fault)


def work(root: Path, number: int, builds: int, many: bool) -> bool:
    """Get or build one key, check it, and tell whether it was there."""

    def build(space: Workspace) -> dict[str, Blob]:
        os.write(builds, b".")
        (space.folder / "graph").write_bytes(CONTENT)
        time.sleep(0 if many else BUILD_SECONDS)
        return {"graph": space.put_file(space.folder / "graph"), "own": space.put_bytes(str(many * number).encode())}

    store = Store(root)
    entry, hit = store.get_or_build(key(batch=number if many else 0), build)
    if store.path(entry.outputs["graph"]).read_bytes() != CONTENT:
        raise RuntimeError("wrong content")
    return hit


def main(root: Path, count: int, many: bool, faults: list[str]) -> None:
    gate, open_gate = os.pipe()
    builds_out, builds = os.pipe()
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            os.close(open_gate)
            try:
                for fault in faults:
                    inject(fault, number)
                os.read(gate, 1)
                hit = work(root, number, builds, many)
            except BaseException:  # noqa: BLE001 - whatever it is, the fork must not go on as if it were the parent
                traceback.print_exc()
                os._exit(2)
            os._exit(int(hit))
        children.append(child)
    os.close(open_gate)
    quantized = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if set(quantized) - {0, 1}:
        raise SystemExit(f"a process failed: {quantized}")
    os.close(builds)
    ran = len(os.read(builds_out, 1 << 16))
    print(json.dumps({"built": quantized.count(0), "hits": quantized.count(1), "builds": ran}))
