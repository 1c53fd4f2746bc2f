"""The contract of executors, on a fake card in each of the guide's modes."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.testing.executors import ExecutorContract, Open, opener
from tests.runtime.executors.hpu.conftest import MODES, Host


@pytest.fixture(params=[mode for mode in MODES if mode != "torch.compile"])
def opened(bundle: Path, host: Host, request: pytest.FixtureRequest) -> Open:
    host(request.param)
    return opener(bundle, request)


@pytest.fixture
def rounds() -> int:
    return 25


class TestContract(ExecutorContract):
    """Of every mode; torch.compile, which traces every bucket for half a second, is in test_modes.py."""
