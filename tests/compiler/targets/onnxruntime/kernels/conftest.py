from __future__ import annotations

from pathlib import Path

import pytest

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS
from llmc.compiler.targets.onnxruntime.kernels import build
from tests.compiler.targets.onnxruntime.kernels.host import build_any, own_set


@pytest.fixture(scope="module", autouse=True)
def _host() -> None:
    """Tests are skipped where the kernels do not run."""
    own_set()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of operators that this host runs."""
    return build.build(tmp_path_factory.mktemp("kernels"), own_set().name)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The library of every x86-64 set, emulated where this host does not run it."""
    return {s.name: build_any(tmp_path_factory.mktemp(s.name), s.name) for s in KERNEL_SETS if s.machine == "x86_64"}
