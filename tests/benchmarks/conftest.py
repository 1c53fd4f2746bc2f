from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # the programs there import one another so


@pytest.fixture(scope="module")
def of() -> Any:
    """Imports a module of the benchmarks."""
    return importlib.import_module
