"""What something took of an accelerator's memory, told where somebody reads it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmc.runtime.executors.whole_step.executor import took

GIB = 1 << 30


def accelerator(*free: int) -> Any:
    """A accelerator of 8 GiB, so many bytes free each time it is asked."""
    left = list(free)
    return cast(Any, SimpleNamespace(memory=lambda: (left.pop(0), 8 * GIB), left=left))


def test_the_line_says_what_is_less_free_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "llmc"), took(accelerator(7 * GIB, 5 * GIB), "Pre-loading model weights on hpu"):
        pass
    assert "Pre-loading model weights on hpu took 2 GiB of device memory (3 GiB/8 GiB used)" in caplog.text


def test_nothing_is_requested_or_collected_where_nobody_reads_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.collect", lambda: pytest.fail("a full collection takes a quarter of a second"))
    silent = accelerator(7 * GIB)
    with took(silent, "Pre-loading model weights on hpu"):
        pass
    assert silent.left == [7 * GIB]
