"""Contenders whose engine is fake_engine.py: no library, no time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from baselines.worker import Contender

from tests.toys import toy, toys, trusted

__all__ = ["toy", "toys", "trusted"]

FAKE = str(Path(__file__).parents[2] / "bench" / "fake_engine")
"""As `Contender.engine` has it: an absolute path instead of a name in engines/."""


@pytest.fixture
def contender() -> Callable[..., Contender]:
    def make(
        name: str,
        kind: Any = "baseline",
        model: str = "model",
        bits: float | None = 8,
        searched: Any = None,
        **options: Any,
    ) -> Contender:
        return Contender(name, kind, FAKE, sys.executable, model, options, bits, searched=searched or {})

    return make
