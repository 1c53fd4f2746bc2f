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


def host_memory() -> int | None:
    """Bytes of memory that this host has, or a container that this process is in may take; None: unknown."""
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    return min(found, int(limit)) if limit.isdigit() else found


def available_memory() -> int | None:
    """Bytes of memory that can still be taken; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return None
