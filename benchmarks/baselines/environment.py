"""The packages for baselines that a Python has; found in a process of that Python, which may be another one than
this."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from baselines.catalogue import Requested, requirement
from llmc.errors import DeviceError, InputError
from llmc.paths import expanded

_SCRIPT = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
TIMEOUT_S = 60.0


def interpreter(path: str | Path | None) -> str:
    """The absolute path of the baselines' Python; without a name, this process's. Raises InputError if it is not a
    program.

    Links are kept: a virtual environment's Python is one.
    """
    if path is None:
        return sys.executable
    found = expanded(path).absolute()
    if found.is_dir():
        found = found / "bin" / "python"
    if not found.is_file():
        raise InputError(
            f"{path}: no Python there; --baseline-python is that of an environment that holds the baselines"
        )
    return str(found)


def installed(python: str, distributions: Iterable[str]) -> dict[str, str]:
    """The versions of those that are there; raises DeviceError where `python` does not run."""
    try:
        done = subprocess.run(
            [python, "-c", _SCRIPT, *distributions], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        )
        return dict(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise DeviceError(f"{python}: cannot be run to see what it has installed ({error})") from error


def require(requested: Iterable[Requested], python: str) -> dict[str, str]:
    """Versions of all that the baselines need; raises DeviceError with the pip line for what is missing."""
    wanted = list(dict.fromkeys(name for one in requested for name in one.distributions))
    found = installed(python, wanted)
    missing = [name for name in wanted if name not in found]
    if missing:
        lines = " ".join(f"'{requirement(name)}'" for name in missing)
        more = " onnx onnx_ir" if {"onnxruntime-genai", "onnxruntime"} & set(missing) else ""
        raise DeviceError(
            f"{', '.join(missing)} not installed in {python}; install with: {python} -m pip install {lines}{more}, "
            "or name the Python of an environment that has it: --baseline-python"
        )
    return found
