"""Run a command, and what it starts, as on a CPU with nothing after AVX2, for engines that ask CPUID what there is.

    python benchmarks/only_avx2.py .venv/bin/python benchmarks/compare.py BUNDLE openvino-genai:int8 …

CPUID answers without AVX-512, AVX-VNNI and tiles (only_avx2.c), which Linux and the CPU must allow: /proc/cpuinfo has
`cpuid_fault`. Not hidden: what the C library chose before (its memcpy), what a program reads in /proc/cpuinfo, and
what was decided when it was compiled (llama.cpp from source). llmc reads that file: set LLMC_CPU_ISA=avx2 for it too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from llmc.compiler.targets.onnxruntime.kernels.build import zig

SOURCE = Path(__file__).resolve().with_suffix(".c")


def hidden(folder: Path) -> dict[str, str]:
    """This process's environment variables, with those that hide features from what is started with them.

    The library is compiled in `folder`. Raises SystemExit where that cannot be done.
    """
    library = folder / "only_avx2.so"
    done = zig(("cc", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(library)), folder)
    if done.returncode:
        raise SystemExit(f"only_avx2.py: {SOURCE.name} does not compile: {done.stderr.strip()}")
    return {**os.environ, "LD_PRELOAD": f"{library}:{os.environ.get('LD_PRELOAD', '')}".rstrip(":")}


def main(arguments: list[str]) -> int:
    """Run the command `arguments` and return its exit status, 128 + n where signal n ended it."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    if "cpuid_fault" not in Path("/proc/cpuinfo").read_text().split():
        raise SystemExit(
            "only_avx2.py: this CPU, or its hypervisor, does not let CPUID fault (no cpuid_fault in /proc/cpuinfo)"
        )
    with TemporaryDirectory() as folder:
        status = subprocess.run(arguments, env=hidden(Path(folder)), check=False).returncode
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
