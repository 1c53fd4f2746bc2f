"""The contract of executors, on a fake GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.testing.executors import ExecutorContract, Open, opener
from tests.runtime.executors.inductor.conftest import Host


@pytest.fixture
def opened(bundle: Path, host: Host, request: pytest.FixtureRequest) -> Open:
    host("PyTorch eager mode")
    return opener(bundle, request)


@pytest.fixture
def rounds() -> int:
    return 25


class TestContract(ExecutorContract):
    """Uncaptured; the other modes give the same numbers, see test_modes.py."""
