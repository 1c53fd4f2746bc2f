"""Builds the operator library (source/) with the C compiler of the package ziglang.

The compiler is pinned, needs nothing of the host, and compiles the same source to the same bytes everywhere. The
library links to nothing: ONNX Runtime passes its interface, and the process already has the needed C library functions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llmc.errors import CompileError
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
