"""What all tests share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_cache_of_the_c_compiler(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Kernels are compiled once for all stores that tests make, and all their processes."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["ZIG_GLOBAL_CACHE_DIR"] = str(shared / "zig")
