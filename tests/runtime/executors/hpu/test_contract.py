"""The contract of executors, on a fake accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.testing.executors import ExecutorContract, Open, opener
from tests.runtime.executors.hpu.conftest import MODES, Host


@pytest.fixture(params=[mode for mode in MODES if mode not in ("torch.compile", "PyTorch lazy mode")])
def opened(bundle: Path, host: Host, request: pytest.FixtureRequest) -> Open:
    host(request.param)
    return opener(bundle, request)


@pytest.fixture
def rounds() -> int:
    return 25


class TestContract(ExecutorContract):
    """In the modes whose steps differ: what has no HPU graph runs as in the lazy mode. torch.compile, which traces
    every bucket for half a second, is in test_modes.py."""
