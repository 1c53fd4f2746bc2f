"""CUDA's assembler ptxas from the package nvidia-cuda-nvcc; CUDA need not be installed.

XLA takes ptxas and nvlink from PATH, else from /usr/local/cuda (seen with jax 0.10.2 under strace). A compiling process
puts the package's folder first on PATH, so machine code does not depend on the host's CUDA.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

from llmc.errors import DeviceError
from llmc.platforms import how_to_install, install_line
from llmc.settings import variables

EXTRA = "cuda"
PLUGIN = "jax-cuda13-plugin"
PJRT = "jax-cuda13-pjrt"
NVCC = "nvidia-cuda-nvcc"
PACKAGES = (PLUGIN, PJRT, NVCC)


def versions() -> dict[str, str]:
    """Return versions of the compiler packages without importing them. Raises DeviceError with the install line."""
    found, missing = {}, []
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        raise DeviceError(
            f"compiling for an NVIDIA GPU needs {' and '.join(missing)}; {how_to_install(missing[0], EXTRA)}"
        )
    return found


def use_toolkit() -> None:
    """Make XLA in this process use the package's ptxas. Raises DeviceError where it is missing."""
    versions()
    folder = Path(str(metadata.distribution(NVCC).locate_file("nvidia/cu13/bin")))
    if not os.access(folder / "ptxas", os.X_OK):
        raise DeviceError(
            f"{NVCC} has no ptxas that can be run at {folder}; install it again with: {install_line(EXTRA)}"
        )
    path = variables(("PATH",)).get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != str(folder):
        os.environ["PATH"] = f"{folder}{os.pathsep}{path}"
