"""Processes that this one starts: compilers such as ptxas or neuronx-cc among them.

Python code tells of each before it starts it (audit.py). Native code does not. What it starts is found among the
children that /proc lists, looked at every LOOK_S seconds, or, once it has ended and was waited for, by what
getrusage says of all such children (proc(5), getrusage(2)). Of two that native code starts and waits for between two
looks, one is seen. Children of children are theirs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from llmc.runtime.certificate.witnesses import audit
from llmc.runtime.executors.compilations import Witness

LOOK_S = 0.02
"""Looking takes 0.1 ms."""
FORKS = 10
"""Milliseconds that a process which has forked is given to run its own program, before it is named."""
ENDED = "a process of native code, which had ended before it could be named"
_TASKS = Path("/proc/self/task")


class ProcessWitness(Witness):
    """See the module's docstring."""

    name = "processes started"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: list[str] = []
        self._told = 0
        """Processes that Python told of, and that were not found as children yet."""
        self._known: frozenset[int] = frozenset()
        self._ended: tuple[float, ...] = ()
        self._stopped = threading.Event()
        self._looker = threading.Thread(target=self._look_often, name="llmc-witness", daemon=True)

    def start(self) -> None:
        """Listen, and look at the children from now on."""
        self._ended, self._known = _state()
        audit.listen(self._tell)
        self._looker.start()

    def stop(self) -> None:
        """Look no longer."""
        audit.unlisten(self._tell)
        self._stopped.set()
        self._looker.join()

    def what(self) -> Sequence[str]:
        """The processes, by program."""
        with self._lock:
            self._look(now=True)
            self._told = 0  # whatever failed to start is nobody's name
            return tuple(self._seen)

    def blind(self) -> str:
        """Where the system does not list children, or forgets those that have ended."""
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            return "SIGCHLD is ignored: the system forgets a process that has ended"
        if sys.platform == "win32":
            return "of processes that native code starts, this system tells nothing"
        if not _lists_children():
            return "this system does not list the processes of native code that still run"
        return ""

    def _tell(self, name: str) -> None:
        with self._lock:
            self._seen.append(name)
            self._told += 1

    def _look_often(self) -> None:
        while not self._stopped.wait(LOOK_S):
            with self._lock:
                self._look()

    def _look(self, now: bool = False) -> None:
        """Look at the children; one that has only forked so far gets its name at the next look, unless `now`."""
        ended, found = _state()
        new = found - self._known
        for _ in range(FORKS if now else 0):
            if not any(map(_has_only_forked, new)):
                break
            time.sleep(0.001)
        if not now:
            found -= {pid for pid in new if _has_only_forked(pid)}
        for pid in sorted(found - self._known):
            self._found(pid)
        if ended != self._ended and not self._known - found:
            self._found(None)
        self._known, self._ended = found, ended

    def _found(self, pid: int | None) -> None:
        """A process that nobody knew: the one that Python told of, or one of native code; None: it has ended."""
        if self._told:
            self._told -= 1
        else:
            self._seen.append(ENDED if pid is None else _name_of(pid))


def _state() -> tuple[tuple[float, ...], frozenset[int]]:
    """What ended children have used, and the others, at one moment: none was waited for in between."""
    while True:
        ended, found = _usage_of_ended(), children()
        if ended == _usage_of_ended():
            return ended, found


def children() -> frozenset[int]:
    """The children of this process, those that nobody has waited for included; none where /proc does not list them."""
    found: set[int] = set()
    try:
        for task in os.listdir(_TASKS):  # noqa: PTH208 - names alone, which is often
            try:
                with open(f"{_TASKS}/{task}/children", "rb") as file:  # noqa: PTH123
                    found.update(map(int, file.read().split()))
            except OSError:
                continue  # the thread has ended
    except OSError:
        pass
    return frozenset(found)


def _lists_children() -> bool:
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").exists()


def _has_only_forked(pid: int) -> bool:
    """Whether a child still runs this process's program, or is about to run another one."""
    try:
        command, own = Path(f"/proc/{pid}/cmdline").read_bytes(), Path("/proc/self/cmdline").read_bytes()
        same = Path(f"/proc/{pid}/comm").read_bytes() == Path("/proc/self/comm").read_bytes()
    except OSError:
        return False
    return same and command in (own, b"")


def _name_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ENDED
    return audit.command_name([os.fsdecode(w) for w in words]) if words[0] else name or ENDED


def _usage_of_ended() -> tuple[float, ...]:
    """What children that ended and were waited for have used: it changes with each of them."""
    if sys.platform == "win32":
        return ()
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime, used.ru_stime, used.ru_minflt, used.ru_nvcsw, used.ru_nivcsw
