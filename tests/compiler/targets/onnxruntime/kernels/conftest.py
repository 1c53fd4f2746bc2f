from __future__ import annotations

import platform
from pathlib import Path

import pytest

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS
from llmc.compiler.targets.onnxruntime.kernels import build
from tests.compiler.targets.onnxruntime.kernels.host import build_any, own_set
from tests.compiler.targets.onnxruntime.kernels.single import Library
from tests.compiler.targets.onnxruntime.kernels.standalone import Standalone


@pytest.fixture(scope="module", autouse=True)
def _host() -> None:
    """Tests are skipped where the kernels do not run."""
    own_set()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of operators that this host runs."""
    return build.build(tmp_path_factory.mktemp("kernels"), own_set().name)


MACHINES = sorted({s.machine for s in KERNEL_SETS})


@pytest.fixture(scope="session", params=[pytest.param(machine, marks=pytest.mark.full) for machine in MACHINES])
def others(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Library]:
    """All sets of one machine: libraries, emulated where this host does not run them, or programs in an emulator."""
    built: dict[str, Library] = {}
    for kernels in (s for s in KERNEL_SETS if s.machine == request.param):
        folder = tmp_path_factory.mktemp(kernels.name)
        own = kernels.machine == platform.machine()
        built[kernels.name] = build_any(folder, kernels.name) if own else Standalone(folder, kernels)
    return built
