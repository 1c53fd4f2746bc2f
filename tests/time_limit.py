"""A pytest plugin: `python -m pytest -p tests.time_limit --minutes 20` starts no test after 20 minutes.

A test that runs then is finished. The run passes if no test failed, and says how many were not started. With
pytest-xdist each worker counts from its own start.
"""

from __future__ import annotations

import time
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, metavar="N", help="start no test after N minutes")


def pytest_configure(config: pytest.Config) -> None:
    if (minutes := config.getoption("--minutes")) is not None:
        config.pluginmanager.register(TimeLimit(config, minutes), "llmc-time-limit")


class TimeLimit:
    """Leaves out tests after the limit, in this process, and counts those of workers."""

    def __init__(self, config: pytest.Config, minutes: float) -> None:
        self._config, self._minutes = config, minutes
        self._ends = time.monotonic() + minutes * 60
        self._not_run = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        if time.monotonic() < self._ends:
            return None
        self._not_run += 1
        return True

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):  # pytest-xdist sends it to the process that reports
            self._config.workeroutput["not_run"] = self._not_run

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._not_run += getattr(node, "workeroutput", {}).get("not_run", 0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._not_run:
            terminalreporter.write_line(f"{self._not_run} tests were not run: the limit of {self._minutes:g} minutes")
