"""A pytest plugin for mutation_judge.py: runs test files in the order given, and logs what begins and what fails.

Each line of the file MUTATION_LOG is a JSON list: ["begins", test], ["fails", test] or ["not collected", file].
MUTATION_LEFT_OUT is a JSON list of tests to leave out.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

LOG = Path(os.environ["MUTATION_LOG"])
LEFT_OUT = frozenset(json.loads(os.environ["MUTATION_LEFT_OUT"]))


def _log(what: str, test: str) -> None:
    with LOG.open("a") as file:
        file.write(json.dumps([what, test]) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Undo the order that conftest.py gives files."""
    locations = {argument.split("::")[0]: location for location, argument in enumerate(config.args)}
    wanted = (item for item in items if item.nodeid not in LEFT_OUT)
    items[:] = sorted(wanted, key=lambda item: locations.get(item.nodeid.split("::")[0], len(locations)))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Log a test that begins: the last one is what a hanging run hangs in."""
    _log("begins", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Log a failure."""
    if report.failed:
        _log("fails", report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Log a file that cannot be imported."""
    if report.failed:
        _log("not collected", report.nodeid)
