"""Selects kernel variants for `--cpu` by CPU name, using the features that the kernels' C compiler knows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from functools import cache

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS, KernelSet, best_set
from llmc.artifacts.temporaries import temporary_folder
from llmc.compiler.targets.onnxruntime.kernels.build import zig
from llmc.errors import InputError

NATIVE, ALL = "native", "all"
_NAMED = {ALL: KERNEL_SETS, **{s.name: (s,) for s in KERNEL_SETS}}
_CPU, _FEATURE = re.compile(r"^ (\w+)$", re.MULTILINE), re.compile(r"^\s+\.(\w+),$", re.MULTILINE)

_COMPILER_S = {
    "asimddp": "dotprod", "asimdhp": "fullfp16", "amx_tile": "amx_tile", "amx_int8": "amx_int8", "amx_bf16": "amx_bf16",
}  # fmt: skip
"""The compiler's names of features where they are not /proc/cpuinfo's without underscores."""


def sets_for(requested: str, here: Collection[str]) -> tuple[KernelSet, ...]:
    """Return the kernel variants for the CPUs in `requested`, a comma-separated list, fastest first.

    A name is a compiler's CPU name (znver4, sapphirerapids, x86-64-v3), a variant's (avx2), "native" for a host with
    the features `here`, or "all". Raises InputError for an unknown name, or a CPU that runs no variant.
    """
    found = {one.name for name in requested.split(",") for one in _sets_of(name.strip(), here)}
    return tuple(s for s in KERNEL_SETS if s.name in found)


def _sets_of(name: str, here: Collection[str]) -> tuple[KernelSet, ...]:
    if name in _NAMED:
        return _NAMED[name]
    fits = best_set(here) if name == NATIVE else best_set(features_of(name))
    if fits is None:
        sets = "; ".join(f"{s.name} needs {', '.join(s.features)}" for s in KERNEL_SETS)
        raise InputError(f"CPU {name}: llmc's kernels have no variant for this CPU ({sets}); use --kernels onnxruntime")
    return (fits,)


@cache
def features_of(name: str) -> frozenset[str]:
    """Return the features of CPU `name` and its machine, as /proc/cpuinfo names those that kernels need.

    The machine may be a prefix ("aarch64-neoverse-v1"). Raises InputError for a CPU that the compiler does not know.
    """
    near: set[str] = set()
    for machine, called in _spellings(name.lower()):
        cpu = re.sub(r"^zen(?=\d)", "znver", called).replace("-", "_")
        with temporary_folder("cpus") as folder:
            reported = zig(("build-obj", "--show-builtin", "-target", f"{machine}-linux", f"-mcpu={cpu}"), folder)
        if reported.returncode == 0:
            features = set(_FEATURE.findall(reported.stdout))
            requested = (f for s in KERNEL_SETS for f in s.features)
            return frozenset({machine, *(f for f in requested if _COMPILER_S.get(f, f.replace("_", "")) in features)})
        near.update(get_close_matches(cpu, _CPU.findall(reported.stderr), 3, 0.6))
    near_by = f" Near it are: {', '.join(sorted(near))}." if near else ""
    raise InputError(
        f"CPU {name}: unknown CPU name.{near_by} Use a compiler's name of a CPU (znver4, haswell, "
        f"x86-64-v3), a kernel variant ({', '.join(s.name for s in KERNEL_SETS)}), {NATIVE} or {ALL}"
    )


def _spellings(name: str) -> Iterator[tuple[str, str]]:
    """Machines with the possible CPU name on each: all of `name`, or the text after the machine."""
    for machine in sorted({s.machine for s in KERNEL_SETS}):
        yield machine, name
        if name.startswith(f"{machine}-"):
            yield machine, name.removeprefix(f"{machine}-")
