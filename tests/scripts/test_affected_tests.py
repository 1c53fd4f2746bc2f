"""The tests that a change affects: those that import it, however far, nearest first; all where nothing is known."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.affected_tests import ROOT, affected_tests
from scripts.import_graph import ImportGraph
from tests.tiers import full

pytestmark = full

LAZY = "def __getattr__(name):\n    return import_module(_HOMES[name])\n"
FILES = {
    "llmc/__init__.py": '_HOMES = {"Store": "llmc.store", "Engine": "llmc.engine"}\n\n' + LAZY,
    "llmc/digest.py": "",
    "llmc/store.py": "def open_store():\n    from llmc.digest import digest\n",
    "llmc/engine.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from llmc.store import Store\n",
    "llmc/registry.py": 'OWN = {"cpu": "llmc.targets.cpu:Cpu"}\n',
    "llmc/targets/__init__.py": "",
    "llmc/targets/cpu.py": "",
    "llmc/targets/source/kernel.c": "",
    "llmc/formats/__init__.py": 'def get(name):\n    return import_module(f"{__name__}.{name}")\n',
    "llmc/formats/json_lines.py": "",
    "llmc/tools/__init__.py": "",
    "llmc/tools/run.py": 'PROGRAM = Path(__file__).with_name("child.py")\n',
    "llmc/tools/child.py": "",
    "tests/__init__.py": "",
    "tests/helpers.py": "import llmc.store\n",
    "tests/test_digest.py": "from llmc import digest\n",
    "tests/test_store.py": "from llmc import Store\n",
    "tests/test_helped.py": "from tests import helpers\n",
    "tests/test_engine.py": "import llmc.engine\n",
    "tests/test_registry.py": "import llmc.registry\n",
    "tests/test_formats.py": "from llmc.formats import get\n",
    "tests/test_tools.py": "from llmc.tools.run import PROGRAM\n",
    "tests/test_makefile.py": 'MAKEFILE = "Makefile"\n',
    "tests/test_child.py": 'CODE = "import sys; from llmc.targets import cpu"\n',
    "tests/docs/__init__.py": "",
    "tests/docs/test_pages.py": "",
    "tests/served/__init__.py": "",
    "tests/served/conftest.py": "import llmc.engine\n",
    "tests/served/test_served.py": "",
    "docs/page.md": "",
    "Makefile": "",
    "pyproject.toml": "",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "--initial-branch", "main")
    git(root, "add", ".")
    git(root, "commit", "--message", "all")
    git(root, "checkout", "-b", "change")
    return root


def git(root: Path, *arguments: str) -> None:
    person = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *person, *arguments], cwd=root, check=True, capture_output=True)


def affected(tree: Path, since: str = "main") -> list[str]:
    """The names of the affected test files, without tests/ and test_."""
    command = [sys.executable, "-m", "scripts.affected_tests", "--since", since, "--root", str(tree)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    return [Path(line).stem.removeprefix("test_") for line in said.splitlines()]


@pytest.fixture
def change(tree: Path) -> Path:
    git(tree, "checkout", "--force", "-B", "change", "main")
    git(tree, "clean", "-fd")
    return tree


ALL = {Path(name).stem.removeprefix("test_") for name in FILES if "/test_" in name}


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("llmc/digest.py", ["digest", "store", "helped"]),
        ("llmc/store.py", ["store", "helped"]),
        ("llmc/engine.py", ["engine", "served"]),
        ("llmc/targets/cpu.py", ["child", "registry"]),
        ("llmc/targets/source/kernel.c", ["child", "registry"]),
        ("llmc/formats/json_lines.py", ["formats"]),
        ("llmc/tools/child.py", ["tools"]),
        ("tests/helpers.py", ["helped"]),
        ("tests/test_engine.py", ["engine"]),
        ("Makefile", ["makefile"]),
        ("docs/page.md", ["pages"]),
    ],
)
def test_a_change_affects_the_tests_that_import_it_nearest_first(
    change: Path, file: str, expected: Sequence[str]
) -> None:
    path = change / file
    path.write_text(path.read_text() + "\n")
    assert affected(change) == expected


def test_committed_untracked_and_deleted_files_are_changes(change: Path) -> None:
    (change / "llmc" / "targets" / "cpu.py").unlink()
    git(change, "commit", "--all", "--message", "deleted")
    (change / "tests" / "test_new.py").write_text("")
    assert set(affected(change)) == {"child", "registry", "new"}


def test_what_changed_in_the_other_branch_meanwhile_is_no_change(change: Path) -> None:
    git(change, "checkout", "-B", "other", "main")
    (change / "llmc" / "store.py").write_text("")
    git(change, "commit", "--all", "--message", "theirs")
    git(change, "checkout", "change")
    (change / "docs" / "page.md").write_text("ours")
    assert affected(change, "other") == ["pages"]


def test_nothing_changed_affects_nothing(change: Path) -> None:
    assert affected(change) == []


def test_everything_is_affected_without_a_merge_base_and_by_what_all_depends_on(change: Path) -> None:
    assert set(affected(change, "no-such-branch")) == ALL
    (change / "pyproject.toml").write_text("# changed")
    (change / "llmc" / "digest.py").write_text("# changed")
    found = affected(change)
    assert found[:3] == ["digest", "store", "helped"]
    assert set(found) == ALL


def test_tests_reach_the_modules_of_llmc() -> None:
    graph = ImportGraph(ROOT)
    files = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("llmc/**/*.py"))[::50]]
    assert [file for file in files if not graph.hops([graph.module_of(file) or file])] == []


def test_the_tests_of_a_module_come_before_those_of_its_users() -> None:
    found = affected_tests(ROOT, ["llmc/buckets/planner/planner.py"])
    assert found.index("tests/buckets/planner/test_planner.py") < found.index("tests/cli/test_main.py")
