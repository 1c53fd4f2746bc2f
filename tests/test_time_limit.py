"""The plugin that ends a run at a limit: what was not started is counted, and fails nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import full

pytestmark = full

ROOT = Path(__file__).parent.parent
TESTS = """
import time

import pytest

@pytest.fixture(scope="session")
def shared(request):
    yield
    open("torn_down", "w").close()

@pytest.mark.parametrize("number", range(6))
def test_one(number, shared):
    later = time.monotonic() + 3600  # an hour passes in the first one
    time.monotonic = lambda: later
    assert number != FAILS
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["one process", "a worker"])
@pytest.mark.parametrize(("fails", "code", "said"), [(-1, 0, "1 passed"), (0, 1, "1 failed")])
def test_tests_after_the_limit_are_counted_and_fail_nothing(
    tmp_path: Path, workers: list[str], fails: int, code: int, said: str
) -> None:
    (tmp_path / "test_six.py").write_text(TESTS.replace("FAILS", str(fails)))
    done = run(tmp_path, *workers, "--minutes", "20")
    assert done.returncode == code, done.stdout
    assert said in done.stdout
    assert "5 tests were not run: the limit of 20 minutes" in done.stdout
    assert (tmp_path / "torn_down").exists()


def test_below_the_limit_all_run_and_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text("def test_a(): pass\n\ndef test_b(): pass\n")
    done = run(tmp_path, "--minutes", "20")
    assert "2 passed" in done.stdout
    assert "not run" not in done.stdout


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "tests.time_limit", *options]
    environment = os.environ | {"PYTEST_ADDOPTS": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
