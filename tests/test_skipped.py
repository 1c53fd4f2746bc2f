"""A run of the tests: long files first, and at its end which were skipped, why, and how to have them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import PACKAGES, SERVERS, begins, unit
from tests.tiers import full

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest

@pytest.fixture
def registry():
    pytest.skip("no docker-registry: apt-get install docker-registry")

@pytest.mark.parametrize("n", range(3))
def test_pushes(registry, n): ...

def test_draws():
    pytest.skip("no browser: apt-get install chromium")

@pytest.mark.skipif(True, reason="the moon is full")
def test_howls(): ...

def test_runs(): ...
"""


def run(folder: Path, tests: str, *options: str) -> str:
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_some.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "none.ini", "--rootdir", ".", *options, "test_some.py"]
    bare = os.environ | {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=bare, capture_output=True, text=True, check=False).stdout


@full
def test_a_run_ends_with_what_was_skipped_why_and_how_to_have_it(tmp_path: Path) -> None:
    (tmp_path / "none.ini").write_text("[pytest]\n")
    for options in ((), ("-p", "xdist.plugin", "-n", "1")):
        said = run(tmp_path, TESTS, *options)
        assert "5 tests were skipped" in said
        assert "   3  no docker-registry: apt-get install docker-registry  (test_some.py)" in said
        assert "   1  the moon is full" in said
        assert "To have them on Debian: apt-get install chromium docker-registry  (.ci/run does, as root)" in said


def test_nothing_is_said_where_nothing_was_skipped(tmp_path: Path) -> None:
    (tmp_path / "none.ini").write_text("[pytest]\n")
    assert "skipped" not in run(tmp_path, "def test_runs(): ...\n")


def test_ci_installs_the_packages_that_reasons_name() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    named = {
        word.strip("\"'`);,")
        for path in (ROOT / "tests").rglob("*.py")
        if path.name != Path(__file__).name
        for line in path.read_text().splitlines()
        if "apt-get install " in line and ("skip" in line or "reason" in line) and "{" not in line
        for word in [line.split("apt-get install ")[1].split()[0]]
    }
    assert named - {"util-linux"} == set(PACKAGES), "util-linux is in every Debian"
    assert all(name in script for name in PACKAGES)


def test_files_that_compile_begin_before_others_and_the_demo_models_before_all() -> None:
    files = sorted((ROOT / "tests").rglob("test_*.py"), key=begins)
    assert {file.name for file in files[:2]} == {"test_every_command.py", "test_real_weights.py"}
    assert begins(files[2]) == 1
    two = ("compiler/targets/cpu/test_cpu.py", "artifacts/store/test_store.py")
    assert [begins(ROOT / "tests" / name) for name in two] == [1, 2]
    assert 20 < sum(begins(file) == 1 for file in files) < len(files) / 2
    runs = [line for line in (ROOT / "Makefile").read_text().splitlines() if "--dist loadfile" in line]
    assert runs and all("--no-loadscope-reorder" in line for line in runs), "else by number of tests"


def test_one_process_runs_all_files_that_share_servers() -> None:
    shared = [path for path in (ROOT / "tests").rglob("test_*.py") if unit(str(path)) == SERVERS]
    names = {path.name for path in shared}
    assert {
        "test_ray.py",
        "test_ray_serve.py",
        "test_openai_client.py",
        "test_errors.py",
    } <= names
    assert len(shared) < 20
    assert unit("tests/server/test_load_balancer.py") == "tests/server/test_load_balancer.py"
