"""Where what compiles on a card keeps its results: all in one folder, so that it can be empty or filled."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLES = ("CUDA_CACHE_PATH", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")
"""The driver's cache of PTX, Triton's kernels, torch.compile's code, vLLM's graphs, and what follows the desktop's."""


def use(folder: str | None) -> None:
    """Set the variables, before anything that reads them is imported; None leaves them alone."""
    for name in VARIABLES if folder else ():
        index = Path(str(folder)) / name.lower()
        index.mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(index)
