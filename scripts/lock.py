"""Write the locks: every package that the project's environments hold, by name and version alone.

  requirements.lock                  .venv: the project with its extra `dev`, what builds it, and the demo's model
  benchmarks/requirements-baselines.lock .venv-baselines, with what it shares with .venv at the same version
  requirements-torch-xla.lock        .venv-torch-xla
  requirements-clients.lock          .venv-clients, at the newest versions whatever one demands of another

They are pip's constraints, for every platform and Python that the project has (markers say where one counts).
Packages in LOW are locked at the lower end of the range that pyproject.toml gives them, so that the locked environment
and the newest one (`make test-newest`) are both ends of it. What is locked stays, unless it cannot or --upgrade is
given.

  python scripts/lock.py UV MODEL [--upgrade]   UV: the program uv; MODEL: the demo's model package, as name==version
  python scripts/lock.py UV --oldest FILE       write the versions of .venv-oldest (`make test-oldest`) instead

.venv-oldest has each package that pyproject.toml names at its lower bound, and all others as they are locked.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOW = ("onnxruntime", "openvino", "transformers", "jax")
PYTHON = "3.11"
"""The oldest Python of the project."""
HEADER = "# Written by `make lock`; see scripts/lock.py. Constraints for pip: names and versions alone.\n"


def lower_bounds(project: dict[str, Any]) -> dict[str, str]:
    """The version that each package's range in pyproject.toml begins with, by the package's name."""
    table = project["project"]
    requested = [*table["dependencies"], *(line for lines in table["optional-dependencies"].values() for line in lines)]
    found: dict[str, str] = {}
    for line in requested:
        if match := re.match(r"([\w.-]+)(?:\[\w+\])?(?:>=|==)([\d.]+)", line):
            found.setdefault(match[1].replace(".", "-"), match[2])
    return found


def resolve(uv: str, lock: Path, sources: Sequence[str], given: Sequence[str], constraints: Sequence[Path]) -> None:
    """Write `lock`: what `sources` (files and uv's options) and the requirements `given` need."""
    with tempfile.TemporaryDirectory() as folder:
        more = Path(folder) / "more.in"
        more.write_text("\n".join(given))
        command = [
            uv, "pip", "compile", "--quiet", "--universal", "--fork-strategy", "fewest", "--python-version", PYTHON,
            "--no-annotate", "--no-header", *(f"-c{path}" for path in constraints),
            *(["--upgrade"] if "--upgrade" in sys.argv else []), "-o", str(lock), *sources, str(more),
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True)
    lock.write_text(HEADER + lock.read_text())


def oldest(uv: str, target: Path, bounds: dict[str, str]) -> None:
    """Write to `target` the versions of an environment at the lower bounds.

    Exits with a message where a package cannot have its lower bound: then no environment would test that bound.
    """
    with tempfile.TemporaryDirectory() as folder:
        others = Path(folder) / "others.txt"
        locked = (ROOT / "requirements.lock").read_text().splitlines()
        others.write_text("\n".join(line for line in locked if line.partition("==")[0] not in bounds))
        command = [
            uv, "pip", "compile", "--quiet", "--resolution", "lowest-direct", "--python-version", PYTHON,
            "--no-annotate", "--no-header", f"-c{others}", "-o", str(target), "pyproject.toml", "--extra=dev",
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True)
    chosen = dict(line.split("==") for line in target.read_text().splitlines())
    higher = [
        f"{name}>={bound} (at least {chosen[name]} with the others)"
        for name, bound in bounds.items() if name in chosen and not _is(chosen[name], bound)
    ]  # fmt: skip
    if higher:
        sys.exit(f"lower bounds of pyproject.toml that no environment can have: {', '.join(higher)}")


def _is(version: str, bound: str) -> bool:
    """Whether they are one version: 9 is 9.0.0."""
    return re.sub(r"(\.0)+$", "", version) == re.sub(r"(\.0)+$", "", bound)


def main() -> None:
    """Write all, or the oldest versions."""
    uv, model = sys.argv[1:3]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    bounds = lower_bounds(project)
    if model == "--oldest":
        oldest(uv, Path(sys.argv[3]).resolve(), bounds)
        return
    lock = ROOT / "requirements.lock"
    with tempfile.TemporaryDirectory() as folder:
        low = Path(folder) / "low.txt"
        low.write_text("\n".join(f"{name}=={bounds[name]}" for name in LOW))
        resolve(uv, lock, ["pyproject.toml", "--extra=dev"], project["build-system"]["requires"], [low])
    lock.write_text(lock.read_text() + f"{model}\n")  # it is installed without what it depends on
    resolve(
        uv,
        lock.parent / "benchmarks/requirements-baselines.lock",
        ["benchmarks/requirements-baselines.txt"],
        [],
        [lock],
    )
    resolve(uv, lock.parent / "requirements-torch-xla.lock", ["requirements-torch-xla.txt"], [], [])
    clients = "requirements-clients.txt"
    resolve(uv, lock.parent / "requirements-clients.lock", [clients, f"--override={clients}"], [], [])


if __name__ == "__main__":
    main()
