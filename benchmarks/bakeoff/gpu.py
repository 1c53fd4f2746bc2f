"""The GPU that figures are of, and the packages that they need."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from baselines.machine import describe

NEEDS: Mapping[str, tuple[str, ...]] = {
    "llmc cuda": ("jax", "jax_cuda13_plugin", "torch", "transformers"),
    "llmc inductor": ("torch", "transformers", "triton"),
    "llmc xla": ("jax", "torch", "transformers"),
    "memory copy": ("torch",),
    "transformers eager": ("torch", "transformers"),
    "transformers reduce-overhead": ("torch", "transformers", "triton"),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
}
"""Modules that each contender imports on a GPU."""
ON_CPU = {"llmc inductor": ("torch", "transformers"), "transformers reduce-overhead": ("torch", "transformers"),
          "memory copy": ("numpy",)}  # fmt: skip
"""The same on a CPU, where they differ."""
PACKAGES = ("torch", "triton", "transformers", "jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "vllm",
            "sglang", "flashinfer-python")  # fmt: skip


def lacking(name: str, device: str) -> str:
    """What a contender lacks here, in words; "" for nothing."""
    needs = ON_CPU.get(name, NEEDS[name]) if device == "cpu" else NEEDS[name]
    missing = [module for module in needs if find_spec(module) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def machine(device: str) -> dict[str, Any]:
    """The host, its GPU, and the versions of what is installed."""
    found = {**describe(), "device": device, "versions": {}}
    for name in PACKAGES:
        try:
            found["versions"][name] = version(name)
        except PackageNotFoundError:
            continue
    if device != "cpu":
        import torch

        at = torch.cuda.get_device_properties(0)
        found |= {"gpu": at.name, "capability": f"{at.major}.{at.minor}", "memory": at.total_memory,
                  "cuda": torch.version.cuda}  # fmt: skip
    return found
