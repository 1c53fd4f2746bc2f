from __future__ import annotations

from pathlib import Path

import pytest

from llmc.compiler.targets.onnxruntime.kernels.build import build
from llmc.compiler.targets.onnxruntime.kernels.limits import runs_on
from llmc.runtime.host import cpu_features


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of operators; what runs them is skipped where the CPU cannot."""
    if not runs_on(cpu_features()):
        pytest.skip("the CPU has no AVX-512 VNNI")
    return build(tmp_path_factory.mktemp("kernels"))
