"""Write the locks: every package that the project's environments hold, by name and version alone.

  requirements.lock                  .venv: the project with its extra `dev`, what builds it, and the demo's model
  benchmarks/requirements-peers.lock .venv-peers, with what it shares with .venv at the same version
  requirements-torch-xla.lock        .venv-torch-xla

They are pip's constraints, for every platform and Python that the project has (markers say where one counts).
Packages in LOW are locked at the lower end of the range that pyproject.toml gives them, so that the locked environment
and the newest one (`make test-newest`) are both ends of it. What is locked stays, unless it cannot or --upgrade is
given.

  python scripts/lock.py UV MODEL [--upgrade]   UV: the program uv; MODEL: the demo's model package, as name==version
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOW = ("onnxruntime", "openvino", "transformers", "jax")
PYTHON = "3.11"
"""The oldest Python of the project."""
HEADER = "# Written by `make lock`; see scripts/lock.py. Constraints for pip: names and versions alone.\n"


def lower_ends(project: dict[str, object]) -> list[str]:
    """name==version for each package of LOW: the version that its range in pyproject.toml begins with."""
    table = project["project"]
    assert isinstance(table, dict)
    asked = [*table["dependencies"], *(line for lines in table["optional-dependencies"].values() for line in lines)]
    found = {}
    for line in asked:
        if match := re.match(r"([\w-]+)(?:>=|==)([\d.]+)", line):
            found.setdefault(*match.groups())
    return [f"{name}=={found[name]}" for name in LOW]


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


def main() -> None:
    """Write all three."""
    uv, model = sys.argv[1:3]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lock = ROOT / "requirements.lock"
    with tempfile.TemporaryDirectory() as folder:
        low = Path(folder) / "low.txt"
        low.write_text("\n".join(lower_ends(project)))
        resolve(uv, lock, ["pyproject.toml", "--extra=dev"], project["build-system"]["requires"], [low])
    lock.write_text(lock.read_text() + f"{model}\n")  # it is installed without what it depends on
    resolve(uv, lock.parent / "benchmarks/requirements-peers.lock", ["benchmarks/requirements-peers.txt"], [], [lock])
    resolve(uv, lock.parent / "requirements-torch-xla.lock", ["requirements-torch-xla.txt"], [], [])


if __name__ == "__main__":
    main()
