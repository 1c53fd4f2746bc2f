"""Where `make oracles` has unpacked the packages that tests of this folder compare with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tiers import require_mark

FOLDER = Path(os.environ.get("LLMC_ORACLES", Path(__file__).parents[2] / ".oracles"))


def releases(package: str) -> list[Path]:
    """The unpacked releases of a package, oldest first."""
    found = [path for path in FOLDER.glob(f"{package}-[0-9]*") if path.is_dir()]
    return sorted(found, key=lambda path: [int(n) for n in path.name.rpartition("-")[2].split(".") if n.isdigit()])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    require_mark(items, Path(__file__).parent, "oracle")
