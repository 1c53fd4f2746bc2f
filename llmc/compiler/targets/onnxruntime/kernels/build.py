"""The library of operators (source/), compiled by the C compiler that the package ziglang carries.

That compiler is pinned, needs nothing of the host, and makes the same bytes of the same source everywhere. The library
links to nothing: ONNX Runtime hands it its interface, and it takes malloc and free from the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from llmc.errors import CompileError
from llmc.settings import variables

SOURCE = Path(__file__).parent / "source"
TARGET = ("-target", "x86_64-linux-gnu.2.17", "-mcpu=x86_64_v3+avx512f+avx512bw+avx512dq+avx512vl+avx512vnni")
"""What the library is for; tests that a CPU without AVX-512 runs have another."""
_FLAGS = (
    "-std=c11", "-O3", "-shared", "-fPIC", "-ffreestanding", "-nostdlib", "-fvisibility=hidden", "-s", "-Wall",
    "-Wextra", "-Werror",
)  # fmt: skip
CACHE = "ZIG_GLOBAL_CACHE_DIR"
_SECONDS = 600


def build(folder: Path) -> Path:
    """Compile the library in `folder`, an empty one, and return its path; raises CompileError with what went wrong.

    The compiler's own cache is in `folder` too, unless ZIG_GLOBAL_CACHE_DIR says where it is.
    """
    library = folder / "kernels.so"
    sources = sorted(path.name for path in SOURCE.glob("*.c"))
    command = [sys.executable, "-m", "ziglang", "cc", *TARGET, *_FLAGS, *sources, "-o", str(library)]
    shared = variables((CACHE,)).get(CACHE, str(folder / "zig"))
    places = {CACHE: shared, "ZIG_LOCAL_CACHE_DIR": shared}
    try:
        done = subprocess.run(
            command, cwd=SOURCE, env={**os.environ, **places}, capture_output=True, text=True, errors="replace",
            timeout=_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as e:
        raise CompileError(f"the kernels' C compiler cannot run: {e}") from e
    if done.returncode or not library.is_file():
        raise CompileError(f"the kernels do not compile: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return library
