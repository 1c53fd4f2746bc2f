"""The families that `pytest tests/models -k NAME` tests: each file in llmc/compiler/architectures."""

from __future__ import annotations

import pytest

from llmc.compiler.architectures import supported


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `family` runs for each."""
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", supported())
