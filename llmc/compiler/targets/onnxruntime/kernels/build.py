"""Builds the operator library (source/) with the C compiler of the package ziglang, and selects variants by CPU name.

The compiler is pinned, needs nothing of the host, and compiles the same source to the same bytes everywhere. The
library links to nothing: ONNX Runtime passes its interface, and the process already has the needed C library functions.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS, KernelSet, best_set
from llmc.artifacts.temporaries import temporary_folder
from llmc.errors import CompileError, InputError
from llmc.settings import variables

SOURCE = Path(__file__).parent / "source"
_X86 = ("-target", "x86_64-linux-gnu.2.17")
_ARM = ("-target", "aarch64-linux-gnu.2.17")
_DOTPROD = "-mcpu=generic+dotprod+fullfp16"
_AVX512 = "-mcpu=x86_64_v3+avx512f+avx512bw+avx512dq+avx512vl+avx512vnni"
TARGETS = {
    "amx-int8": (*_X86, f"{_AVX512}+avx512bf16+amx_tile+amx_int8+amx_bf16"),
    "avx512-bf16": (*_X86, f"{_AVX512}+avx512bf16"),
    "avx512-vnni": (*_X86, _AVX512),
    "avx-vnni": (*_X86, "-mcpu=x86_64_v3+avxvnni"),
    "avx2": (*_X86, "-mcpu=x86_64_v3"),
    "neon-i8mm": (*_ARM, f"{_DOTPROD}+i8mm+bf16"),
    "neon-dotprod": (*_ARM, _DOTPROD),
}
"""Compiler target options of each kernel variant (artifacts/bundle/kernel_sets.py)."""
FLAGS = (
    "-std=c11", "-O3", "-shared", "-fPIC", "-ffreestanding", "-nostdlib", "-fvisibility=hidden", "-s", "-Wall",
    "-Wextra", "-Werror",
)  # fmt: skip
"""Compiler options of all variants."""
CACHE = "ZIG_GLOBAL_CACHE_DIR"
_SECONDS = 600


def build(folder: Path, name: str) -> Path:
    """Compile the library of variant `name` in the empty `folder`, and return its path.

    Raises CompileError with the reason. The compiler's cache is in `folder` unless ZIG_GLOBAL_CACHE_DIR names another.
    """
    library = folder / "kernels.so"
    sources = sorted(path.name for path in SOURCE.glob("*.c"))
    done = zig(("cc", *TARGETS[name], *FLAGS, *sources, "-o", str(library)), folder)
    if done.returncode or not library.is_file():
        raise CompileError(f"the kernels do not compile: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return library


def zig(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the compiler in SOURCE, with its cache in `folder`. Raises CompileError where it cannot run."""
    shared = variables((CACHE,)).get(CACHE, str(folder / "zig"))
    locations = {CACHE: shared, "ZIG_LOCAL_CACHE_DIR": shared}
    try:
        return subprocess.run(
            [sys.executable, "-m", "ziglang", *arguments], cwd=SOURCE, env={**os.environ, **locations},
            capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as e:
        raise CompileError(f"the kernels' C compiler cannot run: {e}") from e


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
