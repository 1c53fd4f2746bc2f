"""A source distribution builds a wheel with everything that llmc needs, and its slim install runs, without torch."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from llmc.version import __version__
from tests.tiers import full

ROOT = Path(__file__).parent.parent
BUNDLE = ROOT / "tests" / "data" / "golden" / "v1" / "bundle"
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
PACKAGE = [path for path in (ROOT / "llmc").rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def built(what: str, tree: Path, into: Path) -> Path:
    """What the build backend makes of a source tree, with no network."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, str(into)],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, and that from a copy of the repository without its history."""
    folder = tmp_path_factory.mktemp("package")
    tree = folder / "tree"
    shutil.copytree(ROOT / "llmc", tree / "llmc", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    sdist = built("build_sdist", tree, folder)
    assert sdist.name == f"llmc_compiler-{__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist", filter="data")
    return built("build_wheel", folder / "sdist" / f"llmc_compiler-{__version__}", folder)


@full
def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = email.message_from_bytes(archive.read(f"llmc_compiler-{__version__}.dist-info/METADATA"))
    assert {name for name in names if ".dist-info/" not in name} == {str(p.relative_to(ROOT)) for p in PACKAGE}
    assert "llmc/py.typed" in names and f"llmc_compiler-{__version__}.dist-info/licenses/LICENSE" in names
    assert (about["Version"], about["License-Expression"]) == (__version__, "Apache-2.0")
    assert wheel.stat().st_size < 3e6


def slim() -> list[str]:
    """Names of what llmc needs without extras, and what that needs in turn, as installed here."""
    lines = (ROOT / "pyproject.toml").read_text().split("dependencies = [\n", 1)[1].split("]", 1)[0]
    todo = [Requirement(line.strip(' ",')) for line in lines.splitlines() if line.strip()]
    names: list[str] = []
    while todo:
        requested = todo.pop()
        name = canonicalize_name(requested.name)
        if name not in names and (requested.marker is None or requested.marker.evaluate({"extra": ""})):
            names.append(name)
            todo += map(Requirement, metadata.requires(name) or [])
    return names


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with the wheel and what it needs alone, linked from this environment."""
    folder = tmp_path_factory.mktemp("slim")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for name in slim():
        for file in metadata.distribution(name).files or []:
            top = Path(file.parts[0])
            here = Path(str(metadata.distribution(name).locate_file(top)))
            if top.name not in ("..", "__pycache__") and not (packages / top).exists():
                (packages / top).symlink_to(here)
    python = folder / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)],
        check=True, timeout=300,
    )  # fmt: skip
    return python


def run(python: Path, *command: str) -> subprocess.CompletedProcess[str]:
    alone = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.run(
        command, cwd=python.parent, env=alone, capture_output=True, text=True, timeout=120, check=False
    )


@full
def test_the_slim_install_runs(python: Path, tmp_path: Path) -> None:
    llmc = str(python.with_name("llmc"))
    assert run(python, llmc, "--version").stdout.strip() == __version__
    where = run(python, str(python), "-c", "import llmc; print(llmc.__file__)").stdout
    assert where.startswith(str(python.parent.parent)), "the installed one, not this checkout"
    planned = run(
        python, llmc, "plan", "--max-model-len", "128", "--max-num-seqs", "2", "-o", str(tmp_path / "plan.json")
    )
    assert planned.returncode == 0 and (tmp_path / "plan.json").exists(), planned
    answered = run(python, llmc, "generate", str(BUNDLE), "--prompt", "a", "--max-tokens", "2")
    assert answered.returncode == 0, answered


def test_the_slim_install_says_what_a_compile_needs(python: Path, tmp_path: Path) -> None:
    for heavy in ("torch", "transformers", "jax", "fastapi"):
        assert run(python, str(python), "-c", f"import {heavy}").returncode == 1, f"{heavy} came along"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    refused = run(python, str(python.with_name("llmc")), "compile", str(tmp_path), "-o", str(tmp_path / "bundle"))
    assert refused.returncode != 0 and "Traceback" not in refused.stderr, refused
    served = run(python, str(python.with_name("llmc")), "serve", str(BUNDLE))
    assert served.returncode == 3 and "[serve]'" in served.stderr, served
