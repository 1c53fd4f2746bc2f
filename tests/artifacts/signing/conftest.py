from __future__ import annotations

from pathlib import Path

import pytest

from llmc.artifacts.signing.signer import Signer
from tests.artifacts.signing.helpers import signer


@pytest.fixture
def one(tmp_path: Path) -> Signer:
    return signer(tmp_path, 1)


@pytest.fixture
def two(tmp_path: Path) -> Signer:
    return signer(tmp_path, 2)
