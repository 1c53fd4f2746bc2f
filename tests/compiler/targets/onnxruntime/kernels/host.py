"""This host as one that runs the kernels. Where its CPU has no AVX-512 VNNI, the same C sources are compiled for AVX2
over emulated/immintrin.h, and the host counts as one with all features."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmc.compiler.targets.onnxruntime import target
from llmc.compiler.targets.onnxruntime.kernels import build
from llmc.compiler.targets.onnxruntime.kernels.limits import runs_on
from llmc.runtime.executors import compatibility
from llmc.runtime.host import KERNEL_FEATURES, cpu_features

REAL = build.TARGET
"""Of the product."""

EMULATED = Path(__file__).parent / "emulated"
TARGET = ("-target", "x86_64-linux-gnu.2.17", "-mcpu=x86_64_v3", "-I", str(EMULATED))
_NEEDED = {"avx2", "f16c", "fma"}


@contextmanager
def kernels_run() -> Iterator[None]:
    """Until the end the kernels run in this process, and so do bundles that are compiled with them."""
    features = cpu_features()
    if runs_on(features):
        yield
        return
    if sys.platform != "linux" or platform.machine() != "x86_64" or not set(features) >= _NEEDED:
        pytest.skip("the kernels are for x86-64, and their tests for a CPU with AVX2 or AVX-512 VNNI")
    able = (features[0], *sorted({*features[1:], *KERNEL_FEATURES}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "TARGET", TARGET)
        for module in (target, compatibility):
            patch.setattr(module, "cpu_features", lambda: able)
        yield
