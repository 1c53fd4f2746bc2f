"""The families that `pytest tests/models -k NAME` tests: each file in llmc/compiler/architectures, and other forms."""

from __future__ import annotations

import pytest

from llmc.compiler.architectures import supported
from llmc.compiler.architectures.shared.caches import cache_of
from tests.compiler import tiny


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `family` runs for each, one with `stateful` for those that keep states."""
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", [*supported(), *tiny.FORMS])
    if "stateful" in metafunc.fixturenames:
        stateful = [family for family in supported() if cache_of(tiny.of_family(family)).states]
        metafunc.parametrize("stateful", stateful)
