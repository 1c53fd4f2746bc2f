"""Graphs that no compile makes end in errors: nothing is read or written where it should not be, nothing is fatal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiler.targets.onnxruntime.kernels.crafted import GRAPHS
from tests.tiers import default_cases


@pytest.fixture(scope="module")
def reported(library: Path) -> dict[int, str | None]:
    """What came of each graph, in a process of their own; None for one that ended it."""
    command = [sys.executable, "-m", "tests.compiler.targets.onnxruntime.kernels.crafted", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@default_cases(140)
@pytest.mark.parametrize("index", range(len(GRAPHS)), ids=lambda n: f"{GRAPHS[n].op} {n} {' '.join(GRAPHS[n].change)}")
def test_a_crafted_graph_is_an_error(reported: dict[int, str | None], index: int) -> None:
    graph = GRAPHS[index]
    assert index in reported, f"graph {max(reported)} ended the process: {GRAPHS[max(reported)]}"
    found = reported[index]
    assert found is not None, "it ended the process"
    assert graph.error in found if graph.error else not found, found
