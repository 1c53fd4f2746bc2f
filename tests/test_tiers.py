"""The tiers of the tests: the fast one is chosen by folder, imports nothing heavy, and holds to that by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from itertools import combinations
from pathlib import Path

import pytest

from tests.conftest import FAST, HEAVY, SLOW, NoHeavyPackages, is_fast, reproduces
from tests.tiers import full, pairwise

TESTS = Path(__file__).parent


def fast(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "--fast", "-p", "no:cacheprovider", *arguments]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(command, cwd=TESTS.parent, env=own, capture_output=True, text=True, check=False).stdout


def test_what_the_tiers_name_is_there() -> None:
    assert [name for name in (*FAST, *SLOW) if not (TESTS / name).exists()] == []
    assert [name for name in SLOW if not any(name.startswith(folder) for folder in FAST)] == [], "slow as it is"


@full
def test_the_fast_tier_compiles_and_answers_without_a_heavy_package() -> None:
    assert "passed" in (said := fast("tests/runtime/test_llm.py")) and "failed" not in said, said


@pytest.mark.parametrize("package", sorted(HEAVY))
def test_an_import_of_a_heavy_package_is_refused_with_the_remedy(package: str) -> None:
    with pytest.raises(ImportError, match=f"the fast tier imports no {package}[.]part: list the test's file in SLOW"):
        NoHeavyPackages.find_spec(f"{package}.part")
    assert NoHeavyPackages.find_spec("numpy") is None


@full
def test_what_is_not_of_the_fast_tier_is_not_even_imported() -> None:
    assert not is_fast(TESTS / "compiler" / "targets" / "cpu" / "test_cpu.py")
    assert "test_cpu" not in fast("--collect-only", "tests/compiler/targets/cpu")


class Checkout:
    """A folder with tests of its own under this project's conftest.py."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self.folder = folder
        self.write({"tests/conftest.py": (TESTS / "conftest.py").read_text(), **files})
        markers = "".join(
            f"\n  {name}:" for name in ("full", "default_cases", "real_weights", "torch_xla", "two_versions")
        )
        self.write({"own.ini": f"[pytest]\nmarkers ={markers}\naddopts = -m 'not full'"})

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)

    def pytest(self, *options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-c", "own.ini", "--rootdir", ".", *options, "tests"]
        bare = os.environ | {
            "PYTEST_ADDOPTS": "",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": str(TESTS.parent),
        }
        ran = subprocess.run(command, cwd=self.folder, env=bare, capture_output=True, text=True, check=False)
        return ran.stdout + ran.stderr

    def collected(self, *options: str) -> list[str]:
        return [
            line for line in self.pytest("--collect-only", *options).splitlines() if "::" in line or "error" in line
        ]


@full
def test_every_test_is_in_one_shard(tmp_path: Path) -> None:
    """Architectures are dealt out by themselves, other files whole."""
    families = "import pytest\n@pytest.mark.parametrize('family', 'abcdefg')\ndef test_family(family): ..."
    one = "def test_a(): ...\n"
    checkout = Checkout(tmp_path, {
        "tests/models/test_one.py": families, "tests/models/test_two.py": families,
        "tests/server/test_file.py": f"{one}def test_b(): ...", "tests/server/test_other.py": one,
        "tests/test_full.py": f"import pytest\npytestmark = pytest.mark.full\n{one}",
    })  # fmt: skip
    everything = checkout.collected("-m", "")
    assert set(everything) - set(checkout.collected()) == {"tests/test_full.py::test_a"}
    shards = [checkout.collected("-m", "", "--shard", f"{n}/3") for n in (1, 2, 3)]
    assert sorted(test for shard in shards for test in shard) == sorted(everything)
    for shard in shards:
        assert sum("test_one" in test for test in shard) == sum("test_two" in test for test in shard) in (2, 3)
        assert sum("test_file" in test for test in shard) in (0, 2)
    assert [checkout.collected("-m", "full", "--shard", f"{n}/2") for n in (1, 2)] == [
        ["tests/test_full.py::test_a"],
        [],
    ]
    assert "argument --shard: invalid _shard value: '4/3'" in " ".join(checkout.collected("--shard", "4/3"))


def test_each_package_has_tests_in_the_default_tier() -> None:
    whole = ("pytestmark = full", "pytestmark = pytest.mark.full", "pytestmark = [pytest.mark.full")
    files = {path: path.read_text() for path in TESTS.rglob("test_*.py")}
    default = {path.parent for path, text in files.items() if not any(mark in text for mark in whole)}
    assert {path.parent for path in files} - default == set()


@full
def test_the_default_tier_has_each_value_of_each_parameter_and_the_full_suite_each_combination(tmp_path: Path) -> None:
    product = """
        import pytest
        @pytest.mark.parametrize("a", range(4))
        @pytest.mark.parametrize(("b", "c"), [(1, 2), (3, 4), (5, 6)])
        def test_product(a, b, c): ...
        @pytest.mark.parametrize("a", range(9))
        def test_one_axis(a): ...
    """
    checkout = Checkout(tmp_path, {"tests/test_some.py": textwrap.dedent(product)})
    assert len(checkout.collected("-m", "")) == 4 * 3 + 9
    default = [test.partition("[")[2].rstrip("]").split("-") for test in checkout.collected()]
    cases = [case for case in default if len(case) == 3]
    assert len(default) - len(cases) == 9 and len(cases) == 4
    assert {a for *_, a in cases} == set("0123") and {tuple(case[:2]) for case in cases} == {
        ("1", "2"),
        ("3", "4"),
        ("5", "6"),
    }


@full
def test_a_case_that_is_marked_stands_for_no_value(tmp_path: Path) -> None:
    product = """
        import pytest
        @pytest.mark.parametrize("a", range(3))
        @pytest.mark.parametrize("way", ["here", pytest.param("elsewhere", marks=pytest.mark.full)])
        def test_product(way, a): ...
    """
    checkout = Checkout(tmp_path, {"tests/test_some.py": textwrap.dedent(product)})
    assert checkout.collected() == [f"tests/test_some.py::test_product[here-{a}]" for a in range(3)]


@full
def test_the_default_tier_has_the_cases_that_a_mark_names(tmp_path: Path) -> None:
    marked = """
        import pytest
        @pytest.mark.default_cases("a-1", "b-2")
        @pytest.mark.parametrize("n", (1, 2, 3))
        @pytest.mark.parametrize("x", ("a", "b"))
        def test_some(x, n): ...
    """
    checkout = Checkout(tmp_path, {"tests/test_some.py": textwrap.dedent(marked)})
    assert checkout.collected() == ["tests/test_some.py::test_some[a-1]", "tests/test_some.py::test_some[b-2]"]
    assert len(checkout.collected("-m", "")) == 6
    checkout.write({"tests/test_some.py": textwrap.dedent(marked).replace('"a-1", "b-2"', "2")})
    assert checkout.collected() == ["tests/test_some.py::test_some[a-1]", "tests/test_some.py::test_some[b-1]"]
    checkout.write({"tests/test_some.py": textwrap.dedent(marked).replace("a-1", "c").replace("b-2", "d")})
    assert "tests/test_some.py::test_some: default_cases names none of ['a-1', " in checkout.pytest()


@full
def test_the_default_tier_is_the_same_in_any_order(tmp_path: Path) -> None:
    marked = """
        import pytest
        @pytest.mark.default_cases(3)
        @pytest.mark.parametrize("n", range(9))
        def test_numbered(n): ...
        @pytest.mark.default_cases("a", "b")
        @pytest.mark.parametrize("x", "abcdef")
        def test_named(x): ...
        @pytest.mark.parametrize("a", range(4))
        @pytest.mark.parametrize("b", range(5))
        def test_product(a, b): ...
    """
    checkout = Checkout(tmp_path, {"tests/test_some.py": textwrap.dedent(marked)})
    written = checkout.collected()
    assert len(written) == 3 + 2 + 5
    for seed in range(5):
        shuffled = checkout.collected("-p", "pytest_randomly", f"--randomly-seed={seed}")
        assert shuffled != written and sorted(shuffled) == sorted(written)


@full
def test_property_tests_draw_fewer_examples_in_the_default_tier(tmp_path: Path) -> None:
    drawn = """
        from hypothesis import given, settings, strategies as st
        from tests.tiers import examples
        counts = {"many": 0, "few": 0, "unset": 0}
        @examples(60)
        @given(st.integers())
        def test_many(n): counts["many"] += 1
        @examples(7)
        @given(st.integers())
        def test_few(n): counts["few"] += 1
        @given(st.integers())
        def test_unset(n): counts["unset"] += 1
        def test_counts(): print(counts); assert False
    """
    checkout = Checkout(tmp_path, {"tests/test_some.py": textwrap.dedent(drawn)})
    assert "{'many': 25, 'few': 7, 'unset': 25}" in checkout.pytest()
    assert "{'many': 60, 'few': 7, 'unset': 100}" in checkout.pytest("-m", "")


@full
def test_a_failure_ends_with_the_line_that_reproduces_it(tmp_path: Path) -> None:
    failing = "import pytest\n@pytest.mark.parametrize('a', ['it is', 'b'])\ndef test_a(a): assert a == 'b'"
    said = Checkout(tmp_path, {"tests/test_some.py": failing}).pytest()
    line = next(line for line in said.splitlines() if " -m pytest " in line)
    assert line.endswith("-m pytest -m '' 'tests/test_some.py::test_a[it is]'")
    again = subprocess.run(
        f"{line} -c own.ini --rootdir .", shell=True, cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ
        | {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(TESTS.parent)},
    )  # fmt: skip
    assert "1 failed" in again.stdout, again.stdout + again.stderr
    limited = reproduces("tests/test_some.py::test_a", {"LLMC_CPU_ISA": "avx2"})
    assert limited.startswith("LLMC_CPU_ISA=avx2 ") and limited.endswith("-m pytest -m '' tests/test_some.py::test_a")


def test_pairs_of_values_are_all_there_in_few_cases() -> None:
    every = [(a, b, c) for a in range(4) for b in "xyz" for c in (False, True)]
    found = pairwise(every)
    assert set(found) <= set(every) and 12 <= len(found) < 16
    for axes in combinations(range(3), 2):
        assert {tuple(case[axis] for axis in axes) for case in found} == {
            tuple(case[axis] for axis in axes) for case in every
        }
