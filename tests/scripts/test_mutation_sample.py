"""The mutation sample: the same for the same seed and text; a mutant's tests kill it, or it survives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.mutation_sample import AREAS, REST, ROOT, area_of, sample
from tests.tiers import full

pytestmark = full

FILES = {
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-q'\n",
    "llmc/__init__.py": "",
    "llmc/lengths.py": """
STEP = 1


def rounds(length):
    found = []
    while length:
        length -= STEP
        found = [*found, length]
    return found
""",
    "llmc/spare.py": "SPARE = 7\n",
    "llmc/late.py": "LATE = 7\n",
    "tests/__init__.py": "",
    "tests/test_lengths.py": """
from llmc import lengths

def test_rounds():
    assert lengths.rounds(4) == [3, 2, 1, 0]
""",
    "tests/test_spare.py": "from llmc import spare\n\ndef test_it():\n    assert spare.SPARE\n",
    "tests/test_spare_too.py": "from llmc import spare\n\ndef test_broken():\n    assert not spare.SPARE\n",
    "tests/test_late.py": """
import time
import pytest
from llmc import late

@pytest.mark.parametrize("number", range(999))
def test_it(number):
    time.sleep(0.1)
""",
}
LIMIT_S = 15
"""Many times what pytest takes for a test here."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root


def run(*arguments: object) -> str:
    command = [sys.executable, "-m", "scripts.mutation_sample", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def measured(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, Any]]]:
    """What a run prints, and the record of each mutant by its mutated line."""
    file = tmp_path_factory.mktemp("results") / "mutants.json"
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    said = run("--root", tree, "--mutants", 40, "--limit", LIMIT_S, "--jobs", 2, "--json", file)
    assert {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()} == before, "the checkout changed"
    return said, {record["after"]: record for record in json.loads(file.read_text())["mutants"]}


def status(record: dict[str, Any]) -> str:
    return str(record["results"]["default"]["status"])


def test_a_mutant_that_a_test_notices_is_killed(measured: tuple[str, dict[str, dict[str, Any]]]) -> None:
    killed = measured[1]["STEP = 2"]
    assert status(killed) == "killed"
    assert killed["results"]["default"]["by"] == "tests/test_lengths.py::test_rounds"


def test_a_mutant_that_no_test_notices_survives_and_the_change_is_shown(
    measured: tuple[str, dict[str, dict[str, Any]]],
) -> None:
    said, records = measured
    assert status(records["SPARE = 8"]) == "survived"
    assert "  - SPARE = 7\n  + SPARE = 8\n" in said


def test_a_test_that_fails_without_the_mutant_kills_nothing(measured: tuple[str, dict[str, dict[str, Any]]]) -> None:
    assert "left out, since it fails without a mutant: tests/test_spare_too.py::test_broken" in measured[0]


def test_a_mutant_that_hangs_is_stopped_and_killed(measured: tuple[str, dict[str, dict[str, Any]]]) -> None:
    hanging = measured[1]["length += STEP"]
    assert status(hanging) == "killed"
    assert hanging["results"]["default"]["seconds"] >= LIMIT_S


def test_at_the_limit_with_tests_left_a_mutant_survives(measured: tuple[str, dict[str, dict[str, Any]]]) -> None:
    said, records = measured
    assert status(records["LATE = 8"]) == "survived (time)"
    totals = next(line.split() for line in said.splitlines() if line.startswith("all "))
    assert totals[1:5] == [str(len(records)), str(len(records) - 2), "2", "1"]


def test_an_interrupted_run_goes_on_with_what_it_lacks(tree: Path, tmp_path: Path) -> None:
    known = sample(tree, 49, 40)
    given = {"status": "killed", "by": "an earlier run", "seconds": 1.0}
    spare = next(one for one in known if one.file == "llmc/spare.py")
    records = [one.record() | {"results": {} if one == spare else {"default": given}} for one in known]
    file = tmp_path / "mutants.json"
    file.write_text(json.dumps({"seed": 49, "mutants": records}))
    said = run("--root", tree, "--mutants", 40, "--json", file, "--resume")
    assert said.count("default 1/1") == 1
    found = {record["id"]: record["results"]["default"]["by"] for record in json.loads(file.read_text())["mutants"]}
    assert found.pop(spare.id) == ""
    assert set(found.values()) == {"an earlier run"}


def test_the_sample_follows_from_the_seed_and_the_text_of_lines(tree: Path, tmp_path: Path) -> None:
    chosen = [one.id for one in sample(tree, 1, 20)]
    assert chosen == [one.id for one in sample(tree, 1, 20)] != [one.id for one in sample(tree, 2, 20)]
    other = tmp_path / "llmc"
    other.mkdir()
    (other / "lengths.py").write_text("import os\n\n" + FILES["llmc/lengths.py"])
    moved = {one.id: one for one in sample(tmp_path, 1, 40)}
    ours = {one.id: one for one in sample(tree, 1, 40) if one.file == "llmc/lengths.py"}
    assert ours.keys() == moved.keys()
    assert all(moved[id_].lines() == one.lines() for id_, one in ours.items())


def test_half_of_the_sample_of_llmc_is_in_the_five_areas_and_their_files_exist() -> None:
    counts = dict.fromkeys((*AREAS, REST), 0)
    for one in sample(ROOT, 49, 20):
        assert one.area == area_of(one.file)
        counts[one.area] += 1
    assert counts == {**dict.fromkeys(AREAS, 2), REST: 10}
    for parts in AREAS.values():
        assert [part for part in parts if not (ROOT / part).exists()] == []
