"""The tiers of the tests: the fast one is chosen by folder, imports nothing heavy, and holds to that by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import FAST, HEAVY, SLOW, NoHeavyPackages, is_fast

TESTS = Path(__file__).parent


def fast(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "--fast", "-p", "no:cacheprovider", *arguments]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(command, cwd=TESTS.parent, env=own, capture_output=True, text=True, check=False).stdout


def test_what_the_tiers_name_is_there() -> None:
    assert [name for name in (*FAST, *SLOW) if not (TESTS / name).exists()] == []
    assert [name for name in SLOW if not any(name.startswith(folder) for folder in FAST)] == [], "slow as it is"


def test_the_fast_tier_compiles_and_answers_without_a_heavy_package() -> None:
    assert "passed" in (said := fast("tests/runtime/test_llm.py")) and "failed" not in said, said


@pytest.mark.parametrize("package", sorted(HEAVY))
def test_an_import_of_a_heavy_package_is_refused_with_the_remedy(package: str) -> None:
    with pytest.raises(ImportError, match=f"the fast tier imports no {package}[.]part: list the test's file in SLOW"):
        NoHeavyPackages.find_spec(f"{package}.part")
    assert NoHeavyPackages.find_spec("numpy") is None


def test_what_is_not_of_the_fast_tier_is_not_even_imported() -> None:
    assert not is_fast(TESTS / "compiler" / "targets" / "cpu" / "test_cpu.py")
    assert "test_cpu" not in fast("--collect-only", "tests/compiler/targets/cpu")


def test_every_test_is_of_one_tier(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        marks = {mark.name for mark in item.iter_markers()} & {"fast", "slow"}
        assert marks == ({"fast"} if is_fast(item.path) else {"slow"}), item.nodeid
