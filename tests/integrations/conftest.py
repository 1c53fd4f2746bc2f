"""The fake server, and its setups."""

from __future__ import annotations

import pytest

from llmc.integrations import BUCKETS
from llmc.integrations.base import Setup
from llmc.integrations.configuration import setup_for
from tests.integrations.fake import Fake


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Known by its name too."""
    monkeypatch.setitem(BUCKETS._own, "fake", f"{Fake.__module__}:Fake")  # type: ignore[arg-type]
    return Fake()


@pytest.fixture
def setup(fake: Fake) -> Setup:
    return setup_for(fake, {"max_model_len": 64}, {})
