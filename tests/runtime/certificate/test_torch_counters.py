"""torch.compile is seen by its own counters, and a process without it is known to have compiled nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmc.runtime.certificate import monitors
from llmc.runtime.certificate.monitors import TorchMonitor
from tests.tiers import full

CHILD = """
import torch
from llmc.runtime.certificate.monitors import TorchMonitor

monitor = TorchMonitor()
monitor.start()
assert monitor.count() == 0
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
print(*monitor.what())
import torch._dynamo.utils
torch._dynamo.utils.counters.clear()
monitor.what()
print(monitor.blind())
"""


@full
def test_a_function_that_is_compiled_is_seen() -> None:
    said = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True).stdout
    assert "stats.unique_graphs +1" in said
    assert "somebody cleared the counters" in said


def test_what_is_not_imported_compiled_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, monitors._COUNTERS, raising=False)
    monitor = TorchMonitor()
    monitor.start()
    assert monitor.count() == 0
