"""Which HyperDex there is: the Python that has it, and its version. HyperDex itself is not imported here."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.errors import DeviceError
from llmc.paths import expanded

if TYPE_CHECKING:
    from llmc.settings import Settings

PACKAGE = "hyperdex-toolchain"
"""Its distribution, as Hyper-Accel/docs, docs/install_hyperdex.md at 0ad882a names it."""

INSTALL = 'uv pip install -i "$HYPERACCEL_INDEX" vllm-orion==0.9.0+orion.toolchain151.fpga'
"""The line of HyperAccel's vLLM guide, which installs HyperDex-Toolchain 1.5.1 with it; "hybrid" in place of "fpga" is
the one with GPUs. HYPERACCEL_INDEX is HyperAccel's private package index with one's credentials, see there."""

_ASK = f"from importlib.metadata import version; print(version({PACKAGE!r}))"
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Toolchain:
    """The Python that runs HyperDex, and HyperDex's version without its local part ("+cpu", "+cu126": the torch it was
    built with)."""

    python: str
    version: str


def find(settings: Settings) -> Toolchain:
    """The HyperDex of LLMC_HYPERDEX_PYTHON, or of this Python. Raises DeviceError, with the line that installs it."""
    if settings.hyperdex_python is None:
        try:
            found = metadata.version(PACKAGE)
        except metadata.PackageNotFoundError:
            raise _missing("this environment") from None
        return Toolchain(sys.executable, _public(found))
    python = expanded(settings.hyperdex_python).absolute()
    try:
        changed = python.stat().st_mtime_ns
    except OSError as e:
        raise DeviceError(f"LLMC_HYPERDEX_PYTHON={python} cannot be run ({e.strerror}); name a Python") from None
    return Toolchain(str(python), _version_of(python, changed))


@functools.cache
def _version_of(python: Path, changed: int) -> str:
    """Asked once for each Python, by its time of change."""
    try:
        done = subprocess.run(
            [str(python), "-c", _ASK], capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False
        )
    except OSError as e:
        raise DeviceError(f"LLMC_HYPERDEX_PYTHON={python} cannot be run ({e.strerror}); name a Python") from None
    except subprocess.TimeoutExpired:
        raise DeviceError(f"LLMC_HYPERDEX_PYTHON={python} did not answer within {_LIMIT_S:.0f} seconds") from None
    if done.returncode:
        raise _missing(str(python))
    return _public(done.stdout)


def _public(version: str) -> str:
    return version.strip().partition("+")[0]


def _missing(where: str) -> DeviceError:
    return DeviceError(
        f"HyperDex ({PACKAGE}) is not installed in {where}; with HyperAccel's credentials, in an environment with "
        f"Python 3.10 to 3.12: {INSTALL}; name that environment's Python in LLMC_HYPERDEX_PYTHON"
    )
