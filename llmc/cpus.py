"""The number of CPUs of this process: those that it may run on, limited by its control groups.

A quota of processor time (cgroup v1: cpu.cfs_quota_us over cpu.cfs_period_us, v2: cpu.max) holds for a group and all
below it, so every ancestor's quota counts too. With more threads than the quota, all threads stop for the rest of each
period. A group that cannot be read has no quota.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def usable_cpus() -> int:
    """Threads that each have a CPU, at least 1: the smaller of the CPUs allowed and the quota, rounded up."""
    allowed = len(allowed_cpus())
    return min(allowed, quota() or allowed)


def allowed_cpus() -> frozenset[int]:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def shares(count: int, root: Path = _ROOT) -> list[frozenset[int]]:
    """The CPUs allowed in `count` parts, as even as can be, which part cores and nodes as seldom as can be."""
    allowed, devices = allowed_cpus(), root / "sys/devices/system"
    nodes = [_listed(text) for path in sorted(devices.glob("node/node[0-9]*/cpulist")) if (text := _text(path))]

    def index(cpu: int) -> tuple[int, int, int]:
        node = next((number for number, cpus in enumerate(nodes) if cpu in cpus), 0)
        return node, min(_listed(_siblings(cpu, devices))), cpu

    ordered = sorted(allowed, key=index)
    cuts = [len(ordered) * i // count for i in range(count + 1)]
    return [frozenset(ordered[begin:end]) for begin, end in itertools.pairwise(cuts)]


def quota(root: Path = _ROOT) -> int | None:
    """CPUs' worth of time that the control groups of this process give it, rounded up; None: no bound."""
    return min((bound for folder in _groups(root) if (bound := _bound(folder)) is not None), default=None)


def may_pin(threads: int, root: Path = _ROOT) -> bool:
    """Whether this many threads may be pinned to CPUs. They may if no quota limits the CPUs, and if each CPU has a
    thread, or each thread has its own core on a single NUMA node. Otherwise the system places them better: pinned
    threads that share a core, or use another node's memory, would never move."""
    allowed = allowed_cpus()
    bound = quota(root)
    if bound is not None and bound < len(allowed):
        return False
    devices = root / "sys/devices/system"
    return threads >= len(allowed) or (threads <= _cores(allowed, devices) and _nodes(allowed, devices) == 1)


def _cores(cpus: frozenset[int], devices: Path) -> int:
    """Cores that the CPUs are of; each its own where nothing is known."""
    return len({_siblings(n, devices) for n in cpus})


def _siblings(cpu: int, devices: Path) -> str:
    """The list of the CPUs of its core; itself where nothing is known."""
    return _text(devices / f"cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _nodes(cpus: frozenset[int], devices: Path) -> int:
    """NUMA nodes that have some of the CPUs; 1 where nothing is known."""
    lists = (_text(path) for path in devices.glob("node/node[0-9]*/cpulist"))
    return sum(bool(cpus & _listed(text)) for text in lists if text) or 1


def _listed(text: str) -> set[int]:
    """The numbers of "0-3,8"."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return found


def _groups(root: Path) -> Iterator[Path]:
    """Folders of this process's groups with a quota of processor time, and of their ancestors."""
    paths = {}
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers or "cpu" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    for line in (_text(root / "proc/self/mountinfo") or "").splitlines():
        fields, _, kind = (part.split() for part in line.partition(" - "))
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in paths:
            continue
        if kind[0] == "cgroup" and "cpu" not in kind[-1].split(","):
            continue
        above, mounted = fields[3:5]
        top = root / mounted.lstrip("/")
        within = os.path.relpath(paths[kind[0]], above)  # only a part may be mounted: a container's group
        folder = top if ".." in within.split("/") else top / within
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


def _bound(folder: Path) -> int | None:
    """CPUs' worth of time, rounded up, at least 1; None where there is no bound."""
    given = (_text(folder / "cpu.max") or "").split()
    if not given:
        given = [_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    if len(given) == 2 and given[0].isdecimal() and given[1].isdecimal() and int(given[1]):
        return max(1, -(-int(given[0]) // int(given[1])))
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
