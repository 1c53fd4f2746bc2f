"""The package is imported by every server at start: it stays light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import llmc.artifacts

FOLDER = Path(llmc.artifacts.__file__).parent
PACKAGES = (".", "store", "bundle", "local")
"""Those that a server at start may meet; remotes, registries, archives and signing are for when they are asked for."""
MODULES = sorted(
    ".".join(path.relative_to(FOLDER).with_suffix("").parts)
    for package in PACKAGES
    for path in (FOLDER / package).glob("*.py")
    if path.stem != "__init__"
)
HEAVY = {
    "asyncio",
    "ctypes",
    "dataclasses",
    "filelock",
    "inspect",
    "logging",
    "numpy",
    "platformdirs",
    "pydantic",
    "rich",
    "shutil",
    "subprocess",
    "tempfile",
    "typer",
}

BASE = ("errors", "paths", "platforms", "quiet", "shown", "strict_json", "version", "waiting")
"""Modules under everything, with the standard library alone; llmc itself imports the last three."""


def test_no_module_imports_anything_heavy() -> None:
    imports = ", ".join(f"llmc.artifacts.{name}" for name in MODULES)
    script = f"import sys; before = set(sys.modules); import {imports}; print(*set(sys.modules) - before)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert loaded & HEAVY == set()
    assert {name for name in run.stdout.split() if name.startswith("llmc.")} <= {
        "llmc.artifacts",
        *(f"llmc.{name}" for name in BASE),
        *(f"llmc.artifacts.{name}" for name in (*MODULES, *PACKAGES)),
    }


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_small(name: str) -> None:
    assert len((FOLDER / f"{name.replace('.', '/')}.py").read_text().splitlines()) <= 700
