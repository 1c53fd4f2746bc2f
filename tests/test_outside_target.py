"""A device that another package brings: docs/adding.md's, as it stands there, with nothing in llmc changed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.compiler.targets.base import Target
from llmc.testing.toy import write_toy
from tests.docs.commands import ROOT, section
from tests.tiers import full

TEXT = section(ROOT / "docs" / "adding.md", "Adding a target")
Run = Callable[..., subprocess.CompletedProcess[str]]


def blocks(language: str) -> dict[str, str]:
    """Blocks of code by the file that their first line names."""
    found = re.findall(rf"^```{language}\n# (\S+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return dict(found)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages, as an installer leaves them."""
    folder = tmp_path_factory.mktemp("site")
    for name, text in blocks("python").items():
        (folder / name).write_text(text)
    info = folder / "llmc_pocket-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llmc-pocket\nVersion: 1.0\n")
    points = re.findall(r"\[project\.entry-points\.\"([\w.]+)\"\]\n(\w+) = \"(.*)\"", blocks("toml")["pyproject.toml"])
    assert [group for group, *_ in points] == ["llmc.targets", "llmc.executors"]
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{name} = {value}\n" for group, name, value in points))
    write_toy(folder / "toy")
    return folder


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """Runs Python where the package is installed."""

    def run_(*arguments: object) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(installed), *sys.path])
        environment = {**os.environ, "PYTHONPATH": path, "LLMC_CACHE_DIR": str(tmp_path / "cache"), "COLUMNS": "100"}
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run_


def test_a_device_with_its_executor_takes_sixty_lines_and_the_contract_fits_on_a_screen() -> None:
    assert len(blocks("python")["llmc_pocket.py"].splitlines()) <= 60
    members = {*vars(Target), *Target.__annotations__}
    assert len({name for name in members if not name.startswith("_")}) <= 25


def llmc(run: Run, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run("-c", "import sys; from llmc.cli.main import main; sys.exit(main())", *arguments)


def compile_(run: Run, installed: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    limits = ("--max-model-len", 32, "--max-num-seqs", 2)
    return llmc(run, "compile", installed / "toy", *limits, "-o", "bundle", *arguments)


@full
def test_it_keeps_the_contract(installed: Path, run: Run) -> None:
    ran = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", installed / "test_pocket.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert int(re.findall(r"(\d+) passed", ran.stdout)[0]) >= 15


def test_the_commands_of_the_page(installed: Path, run: Run, tmp_path: Path) -> None:
    ran = compile_(run, installed, "--device", "pocket", "--banks", 2)
    assert ran.returncode == 0 and "one executable per bucket: the device fixes every size" in ran.stdout, ran
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_bytes())
    assert (manifest["device"], manifest["executor"], manifest["options"]["banks"]) == ("pocket", "pocket", 2)
    ran = llmc(run, "generate", "bundle", "--prompt", "abc", "--max-tokens", 8, "--show-buckets")
    assert ran.returncode == 0 and ran.stderr == "compilations while serving: 0\n", ran
    ran = llmc(run, "verify", "bundle")
    assert ran.returncode == 0, ran


@full
def test_its_option_is_a_flag_where_it_belongs(installed: Path, run: Run) -> None:
    listed = llmc(run, "compile", "--help-all").stdout
    assert re.search(r"^  pocket +--banks$", listed, re.M) and "Memory banks" not in listed
    assert re.search(r"^  --banks N +Memory banks", llmc(run, "compile", "--device", "pocket", "--help").stdout, re.M)
    ran = compile_(run, installed, "--device", "fake", "--banks", 2)
    assert (ran.returncode, ran.stderr) == (2, "llmc: error: --banks is for pocket; leave it out for fake\n")
    ran = compile_(run, installed, "--device", "pocket", "--banks", 0)
    assert (ran.returncode, ran.stderr) == (2, "llmc: error: --banks 0 must be at least 1\n")
    devices = {row["device"]: row for row in json.loads(llmc(run, "devices", "--json").stdout)}
    assert (devices["pocket"]["compiles"], devices["pocket"]["runs"]) == ("yes", "yes")


@full
def test_a_change_of_its_source_changes_its_keys(installed: Path, run: Run, tmp_path: Path) -> None:
    def key() -> str:
        assert compile_(run, installed, "--device", "pocket", "--verify", "none").returncode == 0
        return str(json.loads((tmp_path / "bundle" / "manifest.json").read_bytes())["executables"][0]["key"])

    module, before = installed / "llmc_pocket.py", key()
    text = module.read_text()
    try:
        assert key() == before
        module.write_text(text + "\nANOTHER = 1\n")
        assert key() != before
    finally:
        module.write_text(text)


@full
def test_without_the_package_its_bundle_is_refused_in_one_line(installed: Path, run: Run, tmp_path: Path) -> None:
    assert compile_(run, installed, "--device", "pocket", "--verify", "none").returncode == 0
    command = [sys.executable, "-c", "import sys; from llmc.cli.main import main; sys.exit(main())"]
    ran = subprocess.run(
        [*command, "generate", "bundle", "--prompt", "a"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LLMC_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert ran.returncode == 5 and "unknown executor 'pocket'; known: hpu," in ran.stderr, ran
    assert len(ran.stderr.splitlines()) == 1


def test_two_packages_with_a_device_of_one_name_are_refused(installed: Path, run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other_pocket-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other-pocket\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[llmc.targets]\npocket = other:Target\ncpu = other:Target\n")
    ran = run(
        "-c",
        f"import sys; sys.path.append({str(tmp_path)!r}); from llmc.cli.main import main; "
        "sys.exit(main(['compile', 'toy', '--device', 'pocket']))",
    )
    assert ran.returncode == 2
    assert "two installed packages provide a device 'pocket', llmc-pocket and other-pocket; uninstall one" in ran.stderr
