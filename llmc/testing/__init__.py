"""Tests for your own device: subclass `TargetContract` in a test file of your package.

    class TestPocket(TargetContract):
        device = "pocket"

Needs pytest and llmc's extra `compile`. docs/adding.md shows an example.
"""

import pytest

pytest.register_assert_rewrite("llmc.testing.executors", "llmc.testing.targets")

from llmc.testing.executors import ExecutorContract as ExecutorContract  # noqa: E402 - rewritten as it is imported
from llmc.testing.targets import TargetContract as TargetContract  # noqa: E402
