"""Properties of this host that decide whether a bundle fits it."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

_KERNEL_FEATURES = frozenset({
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx_vnni", "avx_vnni_int8", "avx_ne_convert", "amx_int8", "amx_bf16", "amx_tile", "asimd", "asimdhp", "asimddp",
    "i8mm", "bf16", "sve", "sme", "sme2",
})  # fmt: skip

PROMPT_CHUNK = 128
"""Tokens of a prompt step that run fastest on a CPU: activations stay in the cores' caches, 5% faster than 512."""

ROLLING_ROOM = 512
"""Tokens that go into a ring of ONNX Runtime's executor (onnxruntime/rolling.py) before those in it move down."""

KERNELS_PROMPT_CHUNK = 512
"""The same with llmc's own kernels: more run no faster, and take memory (benchmarks/RESULTS.md)."""


def rolling_ring(ring: int, query: int) -> int:
    """Places of a ring that holds `ring` tokens where they lie end to end, and a step adds up to `query`."""
    return ring + max(query, ROLLING_ROOM)


@cache
def cpu_features() -> tuple[str, ...]:
    """The machine architecture and those instruction-set features that kernels are chosen by, sorted.

    Read from /proc/cpuinfo; elsewhere only the architecture is known.
    """
    found: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                found = set(value.split()) & _KERNEL_FEATURES
                break
    except OSError:
        pass
    return (platform.machine(), *sorted(found))


_CGROUP = Path("/sys/fs/cgroup")
"""The control group that a container sees as its own; a host's root group states no limit."""


def host_memory() -> int | None:
    """Bytes of memory that this host has, or a container that this process is in may take; None: unknown."""
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    limit = _cgroup_number("memory.max")
    return found if limit is None else min(found, limit)


def available_memory() -> int | None:
    """Bytes of memory that can still be taken, in the container that this process is in; None: the system does not say.

    A container has its limit without what it holds, where clean pages of files count as free, as the kernel drops them.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    limit, held = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    if limit is None or held is None:
        return found
    return min(found, max(0, limit - held + (_cgroup_number("memory.stat", "inactive_file") or 0)))


def _cgroup_number(file: str, name: str = "") -> int | None:
    """The number in a file of the control group, or behind `name` in it; None for "max" and where there is none."""
    try:
        lines = (_CGROUP / file).read_text().splitlines()
    except OSError:
        return None
    texts = [line.split()[-1] for line in lines if line.startswith(f"{name} " if name else "")]
    return int(texts[0]) if texts and texts[0].isdigit() else None
