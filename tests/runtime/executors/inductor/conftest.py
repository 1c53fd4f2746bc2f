"""A bundle for inductor, and a host with a fake card (tests/fakes/cuda) to open it on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.executors.inductor.executor import InductorOnDevice
from tests.fakes import cuda, gaudi
from tests.fakes.cuda.state import Gpu
from tests.runtime.executors.whole_step.opened import opener

MODES = {"CUDA graphs": ("0", "1"), "torch.compile": ("0", "0"), "PyTorch eager mode": ("1", "1")}
"""(LLMC_ENFORCE_EAGER, LLMC_CUDA_GRAPHS) of each mode."""


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gaudi.write_bundle(tmp_path_factory.mktemp("inductor"), "inductor")


Host = Callable[..., Gpu]
"""Makes this a host with a card in a mode; returns the fake's card."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch.compile compiled, with a compiler that runs what was traced."""
    return cuda.compiles_by_running(monkeypatch)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, compiled: list[Any]) -> Host:
    def install(mode: str = "PyTorch eager mode", **options: Any) -> Gpu:
        eager, graphs = MODES[mode]
        return cuda.install(monkeypatch, LLMC_ENFORCE_EAGER=eager, LLMC_CUDA_GRAPHS=graphs, **options)

    return install


@pytest.fixture
def on_device(bundle: Path, request: pytest.FixtureRequest) -> Callable[..., InductorOnDevice]:
    return opener(bundle, InductorOnDevice, request)
