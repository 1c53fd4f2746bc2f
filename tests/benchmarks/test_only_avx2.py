"""A command under only_avx2.py asks CPUID, and hears of nothing after AVX2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from llmc.runtime.host import cpu_features

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "only_avx2.py"
FAULTS = "cpuid_fault" in Path("/proc/cpuinfo").read_text().split()
ASKS = """
from numpy._core._multiarray_umath import __cpu_features__ as has
print([name for name in ("AVX2", "AVX512F", "AVX512_SPR") if has[name]])
"""


def under(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *command], capture_output=True, text=True, check=False)


def test_what_came_after_avx2_is_hidden_from_what_a_command_starts() -> None:
    started = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {ASKS!r}]))"
    done = under(sys.executable, "-c", started)
    if not FAULTS:
        assert done.returncode == 1
        assert "does not let CPUID fault" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(["AVX2"] if "avx2" in cpu_features() else [])


def test_it_ends_as_its_command_does() -> None:
    assert under().returncode == 2
    assert "only_avx2.py" in under("--help").stdout
    if FAULTS:
        assert under(sys.executable, "-c", "raise SystemExit(7)").returncode == 7
        crashed = under(sys.executable, "-c", "import ctypes; ctypes.string_at(0)")
        assert crashed.returncode == 128 + 11, "another fault is no answer of CPUID's"
