"""The host that a comparison runs on, and the memory bandwidth that bounds its decode steps."""

from __future__ import annotations

import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from llmc.cpus import usable_cpus
from llmc.runtime.host import cpu_features

READ_BYTES = 256 << 20
"""Bytes that each thread reads at a time: more than the caches of any CPU."""


def describe() -> dict[str, Any]:
    """CPU, cores, memory and versions, to judge whether figures can be compared."""
    return {
        "cpu": _from("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": usable_cpus(),
        "memory_gib": round(int((_from("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "isa": list(cpu_features()),
    }


def _from(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def read_bandwidth(threads: int, rounds: int = 7) -> float:
    """Bytes a second that `threads` threads read from memory, each an array of its own; the median over `rounds`.

    numpy's maximum over float32 is what reads: vectorised, without the interpreter's lock, bound by memory.
    """
    arrays = [np.ones(READ_BYTES // 4, np.float32) for _ in range(threads)]
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds + 1):
            began = time.perf_counter()
            list(pool.map(np.max, arrays))
            rates.append(threads * READ_BYTES / (time.perf_counter() - began))
    return median(rates[1:])
