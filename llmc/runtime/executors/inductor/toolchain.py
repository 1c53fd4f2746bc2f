"""What AOTInductor packages are tied to: torch and its CUDA, the card, its driver. Read without importing torch."""

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
"""torch's releases whose packages llmc makes and opens: 2.11.0 and 2.13.0 were run on a CPU."""

INSTALL = "pip install torch==2.13.0"
_CUDA = re.compile(r"^cuda\b[^=]*=\s*['\"]([0-9.]+)['\"]", re.MULTILINE)


def torch_version() -> str:
    """As its package says, without a build's suffix ("2.13.0"); "" where it is not installed."""
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        return ""


def torch_cuda() -> str:
    """The CUDA that torch was built for ("13.0"); "" for a build for CPUs, or none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        return cuda_in((Path(spec.origin).parent / "version.py").read_text())
    except OSError:
        return ""


def cuda_in(version_file: str) -> str:
    """The CUDA that torch's version.py names; "" where it names none."""
    found = _CUDA.search(version_file)
    return found[1] if found else ""


def is_known(torch: str) -> bool:
    """Whether a version of torch is one of the releases above."""
    numbers = tuple(int(part) for part in torch.split(".")[:2] if part.isdecimal())
    return OLDEST <= numbers <= NEWEST


def host() -> Mapping[str, str]:
    """The first card that this process may use, and its software, by name; empty where it has none, or torch has not.

    A driver that does not answer is no card.
    """
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
        "card": gpu.name,
        "compute_capability": ".".join(map(str, gpu.compute_capability)),
        "driver": gpu.driver,
        "cuda": cuda,
        "torch": torch,
    }
