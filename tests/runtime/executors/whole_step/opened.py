"""Executors on a fake card, opened for one test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.whole_step.executor import AcceleratorExecutor
from llmc.testing.executors import SLOTS

E = TypeVar("E", bound=AcceleratorExecutor)


def opener(bundle: Path, kind: type[E], request: pytest.FixtureRequest) -> Callable[..., E]:
    """Opens the bundle on the card of this host, until the test ends."""

    def open_(slots: int = SLOTS) -> E:
        executor = open_executor(Bundle.open(bundle), slots=slots, threads=1)
        request.addfinalizer(executor.close)
        assert isinstance(executor, kind)
        return executor

    return open_
