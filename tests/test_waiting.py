"""Threads of torch sleep while they wait; a user's choice stays, and engines that are compared keep their own ways."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.bench import worker
from llmc.waiting import POLICY, SLEEP, of_others
from tests.artifacts.helpers import REPO
from tests.tiers import full


def policy(environment: dict[str, str]) -> str:
    """What OpenMP itself says that it does, as torch loads it: it prints its settings when it is asked to."""
    environment = {**environment, "PYTHONPATH": str(REPO), "OMP_DISPLAY_ENV": "true"}
    said = subprocess.run(
        [sys.executable, "-c", "import llmc, torch"], env=environment, text=True, capture_output=True, check=True
    )  # fmt: skip
    (line,) = (line for line in said.stderr.splitlines() if POLICY in line)
    return line.split("=")[1].strip(" '")


@full
def test_openmp_is_reported_before_torch_is_imported_unless_the_user_reported_it() -> None:
    without = {name: value for name, value in os.environ.items() if name != POLICY}
    assert policy(without) == "PASSIVE"
    assert policy({**without, POLICY: "ACTIVE"}) == "ACTIVE"


@full
@pytest.mark.parametrize(("given", "kept"), [(SLEEP, None), ("PASSIVE", "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_engines_that_are_compared_wait_as_they_do_without_llmc(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, kept: str | None
) -> None:
    monkeypatch.setenv(POLICY, given)
    assert of_others().get(POLICY) == kept
    seen: list[Any] = []

    def process(*_: Any, **more: Any) -> SimpleNamespace:
        seen.append(more["env"])
        return SimpleNamespace(stdin=io.StringIO(), stdout=io.StringIO('{"ok": {}}\n'), wait=lambda _: 0)

    monkeypatch.setattr(worker.subprocess, "Popen", process)
    worker.Worker("an engine", [], tmp_path / "log").close()
    assert seen[0].get(POLICY) == kept
