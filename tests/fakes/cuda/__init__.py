"""A card for torch.cuda, in this process for one test: what the executor `inductor` asks of torch.cuda, and its errors.

Read from pytorch/pytorch v2.13 (the same in v2.11 where it matters here): torch/cuda/graphs.py, torch/cuda/memory.py,
aten/src/ATen/cuda/CUDAGraph.cpp, c10/cuda/CUDACachingAllocator.cpp, and the CUDA runtime's errors of stream capture
(driver_types.h, 900 to 908). Tensors are on the CPU inside, on cuda:0 outside (tensor.py); memory is counted as the
caching allocator does (allocator.py); graphs record what runs, and run it again (graphs.py).

What a graph takes of the card (graphs.py, NODE_BYTES) is made up: nothing here says what hardware does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fakes import nvidia, pynvml
from tests.fakes.cuda import graphs, state, tensor
from tests.fakes.cuda.state import Gpu

NAME = "NVIDIA H100 80GB HBM3"


def install(patch: pytest.MonkeyPatch, memory: int = 1 << 30, **environment: str) -> Gpu:
    """A host with one card of so many bytes, and a torch with CUDA, until the test ends."""
    for name, value in environment.items():
        patch.setenv(name, value)
    gpu = state.reset(memory)
    nvidia.install(patch, pynvml.Device(total=memory, used=0))
    patch.setattr(torch.version, "cuda", "13.0")
    for name, value in {**graphs.NAMES, **tensor.NAMES}.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch.cuda.memory, "_cuda_endAllocateToPool", graphs.end_allocate_to_pool)
    patch.setattr(torch.cuda.memory, "_cuda_releasePool", graphs.release_pool)
    patch.setattr(torch, "empty", tensor.empty_with_pinned)
    return gpu


def compiles_by_running(patch: pytest.MonkeyPatch) -> list[Any]:
    """Instead of Inductor, whose kernels need a card and seconds: torch.compile traces, and runs what it traced.

    Returns the graphs that were compiled.
    """
    built: list[Any] = []

    def compiles(self: Any, model_: Any, inputs_: Any) -> Any:
        built.append(model_)
        return model_.forward

    patch.setattr(torch._TorchCompileInductorWrapper, "__call__", compiles)
    return built
