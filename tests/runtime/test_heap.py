"""Memory that a thread of a server freed goes back to the system, the free end of its heap included."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tests.artifacts.helpers import REPO

PROGRAM = """
import ctypes, os, sys, threading
from llmc.runtime.heap import settle, share_heap, trim

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if sys.argv[1] == "shared":
    share_heap()
go, done = threading.Semaphore(0), threading.Semaphore(0)
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def use(size):
    block = library.malloc(size)
    ctypes.memset(block, 1, size)
    library.free(block)

def work():
    for size in (30 << 20, 28 << 20):  # the second is no large piece any more for glibc
        go.acquire()
        use(size)
        done.release()
    go.acquire()

threading.Thread(target=work, daemon=True).start()
before = resident()
for _ in range(2):
    go.release()
    done.acquire()
trim()
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such heaps")
def test_a_thread_keeps_nothing_of_what_it_freed_in_a_shared_heap() -> None:
    left = {}
    for how in ("shared", "own"):
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, how], cwd=REPO, capture_output=True, text=True, check=True, timeout=60
        )
        left[how] = int(run.stdout)
    assert left["shared"] < 2 << 20
    assert left["own"] > 20 << 20  # or this test tests nothing
