"""A bundle for hpu, and a host with a fake accelerator (tests/fakes/habana_frameworks) to open it on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.executors.hpu.executor import HpuOnDevice
from tests.fakes import gaudi
from tests.runtime.executors.whole_step.opened import opener

MODES = {
    "torch.compile": (False, False), "PyTorch eager mode": (False, True), "HPU Graphs": (True, False),
    "PyTorch lazy mode": (True, True),
}  # fmt: skip
"""The guide's table: (PT_HPU_LAZY_MODE, --enforce-eager) of each mode."""


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See write_bundle."""
    return gaudi.write_bundle(tmp_path_factory.mktemp("hpu"))


Host = Callable[..., Any]
"""Makes this a Gaudi host in a mode, with the environment that it is given; returns the module `_accelerator`."""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    def install(mode: str = "PyTorch eager mode", **environment: str) -> Any:
        lazy, eager = MODES[mode]
        return gaudi.install(monkeypatch, lazy, LLMC_ENFORCE_EAGER=str(int(eager)), **environment)

    return install


@pytest.fixture
def on_device(bundle: Path, request: pytest.FixtureRequest) -> Callable[..., HpuOnDevice]:
    return opener(bundle, HpuOnDevice, request)
