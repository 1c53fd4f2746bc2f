"""Properties of this host that decide whether a bundle fits it."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from functools import cache
from pathlib import Path

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS, KernelSet
from llmc.cpus import listed_features
from llmc.errors import InputError
from llmc.settings import CPU_ISA, cpu_isa

_KERNEL_FEATURES = frozenset({
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx_vnni", "avx_vnni_int8", "avx_ne_convert", "amx_int8", "amx_bf16", "amx_tile", "asimd", "asimdhp", "asimddp",
    "i8mm", "bf16", "sve", "sme", "sme2",
})  # fmt: skip

_IMPLIED = frozenset({"avx", "asimd"})
"""Features of every CPU that runs an ISA variant, not listed in the variants themselves."""

PROMPT_CHUNK = 128
"""Fastest prefill size on a CPU, in tokens: activations stay in the cores' caches. It is 5% faster than 512."""

ROLLING_ROOM = 512
"""Tokens added to a ring buffer of ONNX Runtime's executor before its contents move down (onnxruntime/executor.py)."""

KERNELS_PROMPT_CHUNK = 512
"""The same with llmc's own kernels. More tokens are no faster and take memory (benchmarks/RESULTS.md)."""


def rolling_ring(ring: int, query: int) -> int:
    """Token slots of a contiguous ring buffer that keeps `ring` tokens and takes up to `query` tokens per step."""
    return ring + max(query, ROLLING_ROOM)


def cpu_features() -> tuple[str, ...]:
    """The machine architecture and the instruction-set features that llmc may use, sorted.

    LLMC_CPU_ISA limits them to one ISA variant. Raises InputError if it names an unknown variant or one that this CPU
    cannot run.
    """
    return _limited(cpu_isa(), host_features())


@cache
def _limited(name: str | None, host: tuple[str, ...]) -> tuple[str, ...]:
    """The features of `host` that a CPU of ISA variant `name` also has; all of them for None."""
    if name is None:
        return host
    known = [s for s in KERNEL_SETS if s.runs_on(host)]
    limit = next((s for s in KERNEL_SETS if name in (s.name, s.name.removesuffix("-int8"))), None)
    if limit is None:
        raise InputError(f"{CPU_ISA}={name!r} is not one of {', '.join(s.name for s in KERNEL_SETS)}; {_remedy(known)}")
    if limit not in known:
        raise InputError(
            f"{CPU_ISA}={name}: this CPU lacks {', '.join(sorted({*limit.isa} - {*host}))}; {_remedy(known)}"
        )
    return (host[0], *(f for f in host[1:] if f in limit.features or f in _IMPLIED))


def _remedy(known: Collection[KernelSet]) -> str:
    return f"set {' or '.join(s.name for s in known)}, or unset it" if known else "unset it"


@cache
def host_features() -> tuple[str, ...]:
    """The machine architecture and this CPU's features that kernels are selected by, sorted.

    Libraries that select kernels themselves see all of these, whatever LLMC_CPU_ISA says. The source is /proc/cpuinfo;
    without it, only the architecture is known.
    """
    return (platform.machine(), *sorted(listed_features() & _KERNEL_FEATURES))


_CGROUP = Path("/sys/fs/cgroup")
"""A container sees its own control group here. A host's root group states no limit."""


def host_memory() -> int | None:
    """Bytes of memory of this host, or the limit of this process's container; None if unknown."""
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    limit = _cgroup_number("memory.max")
    return found if limit is None else min(found, limit)


def available_memory() -> int | None:
    """Bytes of memory that this process can still allocate, within its container; None if unknown.

    In a container this is the limit minus the used memory. Clean file pages count as free because the kernel drops
    them.
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
    """A number in a control-group file, or after `name` in it; None for "max" and for a missing file."""
    try:
        lines = (_CGROUP / file).read_text().splitlines()
    except OSError:
        return None
    texts = [line.split()[-1] for line in lines if line.startswith(f"{name} " if name else "")]
    return int(texts[0]) if texts and texts[0].isdigit() else None
