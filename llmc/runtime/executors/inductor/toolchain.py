"""What AOTInductor packages depend on: torch and its CUDA, the GPU and its driver. Read without importing torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from llmc.errors import DeviceError
from llmc.runtime.nvidia import gpus

OLDEST, NEWEST = (2, 11), (2, 13)
WANTED = "AOTInductor of torch 2.11 to 2.13 is needed"
"""torch releases whose packages llmc creates and opens. 2.11.0 and 2.13.0 were run on a CPU."""

INSTALL = "pip install torch==2.13.0"
_CUDA = re.compile(r"^cuda\b[^=]*=\s*['\"]([0-9.]+)['\"]", re.MULTILINE)


def torch_version() -> str:
    """torch's version without the build suffix ("2.13.0"); "" if not installed."""
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        return ""


def torch_cuda() -> str:
    """The CUDA version that torch was built for ("13.0"); "" for a CPU build or without torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        return cuda_in((Path(spec.origin).parent / "version.py").read_text())
    except OSError:
        return ""


def cuda_in(version_file: str) -> str:
    """The CUDA version in torch's version.py, or ""."""
    found = _CUDA.search(version_file)
    return found[1] if found else ""


def is_known(torch: str) -> bool:
    """Whether a torch version belongs to one of the releases above."""
    numbers = tuple(int(part) for part in torch.split(".")[:2] if part.isdecimal())
    return OLDEST <= numbers <= NEWEST


def host() -> Mapping[str, str]:
    """The first GPU that this process may use, and its software. Empty without an answering driver or CUDA torch."""
    torch, cuda = torch_version(), torch_cuda()
    if not torch or not cuda:
        return {}
    try:
        found = gpus()
    except DeviceError:
        return {}
    if not found:
        return {}
    gpu = found[0]
    return {
        "gpu": gpu.name,
        "compute_capability": ".".join(map(str, gpu.compute_capability)),
        "driver": gpu.driver,
        "cuda": cuda,
        "torch": torch,
    }
