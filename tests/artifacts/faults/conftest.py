from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

TOO_LONG = 20.0


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """A test that waits for ever fails instead."""

    def ring(*_: object) -> None:
        pytest.fail("it waits for ever")  # no Exception, which would be caught

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, TOO_LONG)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
