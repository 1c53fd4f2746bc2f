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


def test_every_test_is_in_one_shard_or_in_all(tmp_path: Path) -> None:
    """Families in shards by themselves, other files whole."""
    families = "import pytest\n@pytest.mark.parametrize('family', 'abcdefg')\ndef test_family(family): ..."
    mark = "real_weights"  # this file is not marked so
    one, marked = "def test_a(): ...\n", f"import pytest\npytestmark = pytest.mark.{mark}\n"
    files = {
        "tests/models/test_one.py": families, "tests/models/test_two.py": families,
        "tests/server/test_file.py": f"{one}def test_b(): ...", "tests/server/test_other.py": one,
        "tests/test_real.py": marked + one, "tests/api/test_quick.py": one,
        "tests/conftest.py": (TESTS / "conftest.py").read_text(),
        "none.ini": "[pytest]\nmarkers =\n  real_weights:\n  fast:\n  slow:\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def collected(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-c", "none.ini", "--rootdir", ".", "--collect-only", *options]
        bare = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        said = subprocess.run([*command, "tests"], cwd=tmp_path, env=bare, capture_output=True, text=True, check=False)
        return [line for line in (said.stdout + said.stderr).splitlines() if "::" in line or "error" in line]

    everything = collected()
    shards = [collected("--shard", f"{n}/3") for n in (1, 2, 3)]
    always = {"tests/test_real.py::test_a", "tests/api/test_quick.py::test_a"}
    assert all(always < set(shard) for shard in shards)
    rest = [test for shard in shards for test in shard if test not in always]
    assert sorted(rest) == sorted(set(everything) - always)
    for shard in shards:
        assert sum("test_one" in test for test in shard) == sum("test_two" in test for test in shard) in (2, 3)
        assert sum("test_file" in test for test in shard) in (0, 2)
    assert "argument --shard: invalid _shard value: '4/3'" in " ".join(collected("--shard", "4/3"))


def test_every_test_is_of_one_tier(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        marks = {mark.name for mark in item.iter_markers()} & {"fast", "slow"}
        assert marks == ({"fast"} if is_fast(item.path) else {"slow"}), item.nodeid
