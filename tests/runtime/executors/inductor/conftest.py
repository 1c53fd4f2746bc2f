"""A bundle for inductor, and a host with a fake card (tests/fakes/cuda) to open it on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.inductor.executor import OnCard
from llmc.testing.executors import SLOTS
from tests.fakes import cuda, gaudi
from tests.fakes.cuda.state import Gpu

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
def on_card(bundle: Path, request: pytest.FixtureRequest) -> Callable[..., OnCard]:
    """Opens the bundle on the card of this host, until the test ends."""

    def open_(slots: int = SLOTS) -> OnCard:
        executor = open_executor(Bundle.open(bundle), slots=slots, threads=1)
        request.addfinalizer(executor.close)
        assert isinstance(executor, OnCard)
        return executor

    return open_
