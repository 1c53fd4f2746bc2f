"""The number of CPUs that this process may use, limited by its affinity mask and its control groups; their features.

A CPU quota (cgroup v1: cpu.cfs_quota_us over cpu.cfs_period_us, v2: cpu.max) applies to a group and its descendants, so
every ancestor's quota counts. With more threads than the quota, all threads stop for the rest of each period. A group
that cannot be read counts as having no quota.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def usable_cpus() -> int:
    """Number of threads that each have a CPU, at least 1: the smaller of the allowed CPUs and the quota, rounded up."""
    allowed = len(allowed_cpus())
    return min(allowed, quota() or allowed)


def allowed_cpus() -> frozenset[int]:
    """CPUs in this process's affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def shares(count: int, root: Path = _ROOT) -> list[frozenset[int]]:
    """Split the allowed CPUs into `count` even parts, splitting cores and NUMA nodes as rarely as possible."""
    allowed, devices = allowed_cpus(), root / "sys/devices/system"
    nodes = [_listed(text) for path in sorted(devices.glob("node/node[0-9]*/cpulist")) if (text := _text(path))]

    def position(cpu: int) -> tuple[int, int, int]:
        node = next((number for number, cpus in enumerate(nodes) if cpu in cpus), 0)
        return node, min(_listed(_siblings(cpu, devices))), cpu

    ordered = sorted(allowed, key=position)
    cuts = [len(ordered) * i // count for i in range(count + 1)]
    return [frozenset(ordered[begin:end]) for begin, end in itertools.pairwise(cuts)]


def quota(root: Path = _ROOT) -> int | None:
    """CPU quota of this process's control groups in CPUs, rounded up; None if there is none."""
    return min((bound for folder in _groups(root) if (bound := _bound(folder)) is not None), default=None)


def may_pin(threads: int, root: Path = _ROOT) -> bool:
    """Whether this many threads may be pinned to CPUs.

    Pinning requires that no quota limits the CPUs, and that each CPU has a thread or each thread has its own core on a
    single NUMA node. Otherwise the operating system places threads better: pinned threads that share a core, or use
    another node's memory, would never move.
    """
    allowed = allowed_cpus()
    bound = quota(root)
    if bound is not None and bound < len(allowed):
        return False
    devices = root / "sys/devices/system"
    return threads >= len(allowed) or (threads <= _cores(allowed, devices) and _nodes(allowed, devices) == 1)


def _cores(cpus: frozenset[int], devices: Path) -> int:
    """Number of cores of these CPUs; each CPU counts as a core if the topology is unknown."""
    return len({_siblings(n, devices) for n in cpus})


def _siblings(cpu: int, devices: Path) -> str:
    """The CPU list of the core of `cpu`; the CPU itself if the topology is unknown."""
    return _text(devices / f"cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _nodes(cpus: frozenset[int], devices: Path) -> int:
    """Number of NUMA nodes with some of these CPUs; 1 if unknown."""
    lists = (_text(path) for path in devices.glob("node/node[0-9]*/cpulist"))
    return sum(bool(cpus & _listed(text)) for text in lists if text) or 1


def _listed(text: str) -> set[int]:
    """Parse a CPU list such as "0-3,8"."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return found


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's CPU control groups and of their ancestors."""
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
        within = os.path.relpath(paths[kind[0]], above)  # a container may mount only a subtree
        folder = top if ".." in within.split("/") else top / within
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


def _bound(folder: Path) -> int | None:
    """The quota of one group in CPUs, rounded up, at least 1; None if there is none."""
    given = (_text(folder / "cpu.max") or "").split()
    if not given:
        given = [_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    if len(given) == 2 and given[0].isdecimal() and given[1].isdecimal() and int(given[1]):
        return max(1, -(-int(given[0]) // int(given[1])))
    return None


CPUINFO = _ROOT / "proc" / "cpuinfo"


def listed_features(file: Path = CPUINFO) -> frozenset[str]:
    """All features of this CPU, as Linux names them; empty where it does not."""
    for line in (_text(file) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
