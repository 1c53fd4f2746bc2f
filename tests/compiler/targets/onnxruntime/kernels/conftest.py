from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.compiler.targets.onnxruntime.kernels import build
from tests.compiler.targets.onnxruntime.kernels.host import kernels_run


@pytest.fixture(scope="module", autouse=True)
def _host() -> Iterator[None]:
    """The kernels run here, whatever the CPU has."""
    with kernels_run():
        yield


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of operators, which this host runs."""
    with kernels_run():
        return build.build(tmp_path_factory.mktemp("kernels"))
