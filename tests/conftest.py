"""What all tests share, and what the run says at its end of those that it skipped."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import llmc  # noqa: F401 - before onnxruntime, whose telemetry it turns off

PACKAGES = ("chromium", "docker-registry", "openssl", "strace", "zstd")
"""Debian's packages that tests use; .ci/run installs them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--other-python", type=Path, help="Python of the environment that two_versions tests compare with")


def pytest_configure() -> None:
    """Ctrl-C interrupts, here and in what tests start: a shell has its background jobs ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that compile go first, the demo model's before all: a long file begun last leaves processors idle.

    With --no-loadscope-reorder workers take files in this order, not in that of the number of their tests.
    """
    items.sort(key=lambda item: begins(item.path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What modules hold stays to the end: the collector walks it neither while it grows, a third of the time that
    finding the tests takes, nor when tests ask for a collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@cache
def begins(path: Path) -> int:
    """When a file begins: 0 for those on the demo model, 1 for those that compile or run what was, 2 for others."""
    text = path.read_text()
    if "pytestmark = pytest.mark.real_weights" in text:
        return 0
    return 1 if "compiler" in path.parts or "tests.compiler" in text else 2


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Which tests were skipped, why, and how to have them; reasons say it as "no NAME: how to have it"."""
    reasons = Counter[str]()
    files: dict[str, set[str]] = {}
    for report in terminalreporter.stats.get("skipped", ()):
        path, _, reason = report.longrepr if isinstance(report.longrepr, tuple) else (report.nodeid, 0, "")
        reason = str(reason).removeprefix("Skipped: ")
        reasons[reason] += 1
        files.setdefault(reason, set()).add((report.nodeid or str(path)).split("::")[0])
    if not reasons:
        return
    terminalreporter.section(f"{reasons.total()} tests were skipped")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:4}  {reason}  ({', '.join(sorted(files[reason]))})")
    if wanted := [name for name in PACKAGES if any(f"apt-get install {name}" in reason for reason in reasons)]:
        terminalreporter.write_line(
            f"To have them on Debian: apt-get install {' '.join(wanted)}  (.ci/run does, as root)"
        )


@pytest.fixture(scope="session", autouse=True)
def _caches_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Kernels are compiled once for all stores that tests make, and all their processes; none is the user's own."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["ZIG_GLOBAL_CACHE_DIR"] = str(shared / "zig")
    os.environ["LLMC_CACHE_DIR"] = str(base / "cache")
