"""The families that `pytest tests/models -k NAME` tests: each file in llmc/compiler/architectures."""

from __future__ import annotations

import pytest

from llmc.compiler.architectures import supported
from llmc.compiler.architectures.shared.caches import cache_of
from tests.compiler import tiny

STATEFUL = [family for family in supported() if cache_of(tiny.of_family(family)).states]
"""Families with states, which ONNX Runtime's executor does not hold yet."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `family` runs for each, one with `on_cpu` or `stateful` for those that are or are not."""
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", supported())
    if "on_cpu" in metafunc.fixturenames:
        metafunc.parametrize("on_cpu", [family for family in supported() if family not in STATEFUL])
    if "stateful" in metafunc.fixturenames:
        metafunc.parametrize("stateful", STATEFUL)
