"""This host as one that runs the kernels, and sets of them that its CPU does not run: the same C sources, compiled for
AVX2 over emulated/immintrin.h."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS, KernelSet, best_set
from llmc.compiler.targets.onnxruntime.kernels import build
from llmc.runtime.host import cpu_features

EMULATED = Path(__file__).parent / "emulated"
_OVER_AVX2 = ("-target", "x86_64-linux-gnu.2.17", "-mcpu=x86_64_v3", "-I", str(EMULATED))
EMULATIONS = {
    "amx-int8": (*_OVER_AVX2, "-D__AVX512VNNI__", "-D__AMX_INT8__", "-D__AMX_BF16__", "-DEMULATED_TILES"),
    "avx512-bf16": (*_OVER_AVX2, "-D__AVX512VNNI__", "-D__AVX512BF16__"),
    "avx512-vnni": (*_OVER_AVX2, "-D__AVX512VNNI__"),
    "avx-vnni": (*_OVER_AVX2, "-D__AVXVNNI__"),
}


def own_set() -> KernelSet:
    """The one that this host runs; tests of kernels are skipped where it runs none."""
    found = best_set(cpu_features())
    if found is None:
        pytest.skip("the kernels are for x86-64 with AVX2")
    return found


def build_any(folder: Path, name: str) -> Path:
    """A library of any set that this host can run: over emulated instructions where the CPU has them not."""
    own_set()
    with pytest.MonkeyPatch.context() as patch:
        if not next(s for s in KERNEL_SETS if s.name == name).runs_on(cpu_features()):
            patch.setitem(build.TARGETS, name, EMULATIONS[name])
        return build.build(folder, name)


def may_tile() -> bool:
    """Whether tiles are here, which Linux lets a process use that asks for it."""
    if "amx_int8" not in cpu_features():
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0
