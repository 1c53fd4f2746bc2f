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
from collections.abc import Sequence
from pathlib import Path

from llmc.runtime.certificate.witnesses import audit
from llmc.runtime.executors.witness import Witness

LOOK_S = 0.02
"""Looking takes 0.1 ms."""
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
        self._known, self._ended = children(), _usage_of_ended()
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
            self._look()
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

    def _look(self) -> None:
        ended, now = _usage_of_ended(), children()
        for pid in sorted(now - self._known):
            self._found(pid)
        if ended != self._ended and not self._known - now:
            self._found(None)
        self._known, self._ended = now, ended

    def _found(self, pid: int | None) -> None:
        """A process that nobody knew: the one that Python told of, or one of native code; None: it has ended."""
        if self._told:
            self._told -= 1
        else:
            self._seen.append(ENDED if pid is None else _name_of(pid))


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
