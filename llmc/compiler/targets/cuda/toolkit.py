"""CUDA's assembler, ptxas, in the package nvidia-cuda-nvcc, and XLA's plug-in that uses it: CUDA need not be installed.

XLA takes the ptxas and nvlink that PATH has, else those of /usr/local/cuda (seen with jax 0.10.2 under strace). So the
package's folder leads PATH in a process that compiles, and machine code is of one version, whatever else the host has.
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
    """Of the packages that compile, without importing them; raises DeviceError with the install line."""
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
    """Make this process, and XLA in it, use the package's ptxas; raises DeviceError where it is not there."""
    versions()
    folder = Path(str(metadata.distribution(NVCC).locate_file("nvidia/cu13/bin")))
    if not os.access(folder / "ptxas", os.X_OK):
        raise DeviceError(
            f"{NVCC} has no ptxas that can be run at {folder}; install it again with: {install_line(EXTRA)}"
        )
    path = variables(("PATH",)).get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != str(folder):
        os.environ["PATH"] = f"{folder}{os.pathsep}{path}"
