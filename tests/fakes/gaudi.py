"""A bundle for hpu, and the fake Gaudi SDK in this process for one test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.testing.executors import PLAN, TOP
from tests.compiler import tiny

FOLDER = Path(__file__).parent
_modules: dict[str, Any] = {}
"""The fake's modules: torch keeps what they register, so they are imported once, and hidden between tests."""


def write_bundle(folder: Path, device: str = "hpu") -> Path:
    """Two layers of llama, compiled for hpu, or another device of portable programs, on a host without one."""
    model = tiny.write_model(folder / "llama", "llama")
    requested = CompileOptions(device, "none", verify="none", sample_top_k=TOP)
    compile_bundle(str(model), folder / "bundle", PLAN, requested, Store(folder / "store"), lambda _: None)
    return folder / "bundle"


def install(patch: pytest.MonkeyPatch, lazy: bool = False, **environment: str) -> Any:
    """A host with the SDK and a new card, until the test ends; `environment` as _card.py states it.

    Returns the fake's module `_accelerator`.
    """
    patch.setenv("PT_HPU_LAZY_MODE", str(int(lazy)))
    for name, value in environment.items():
        patch.setenv(name, value)
    patch.syspath_prepend(str(FOLDER))
    for name, module in _modules.items():
        patch.setitem(sys.modules, name, module)
    import habana_frameworks.torch as bridge
    from habana_frameworks.torch.utils.internal import is_lazy

    for name in [name for name in sys.modules if name.startswith("habana_frameworks")] + ["torch.hpu"]:
        _modules[name] = sys.modules.pop(name)
        patch.setitem(sys.modules, name, _modules[name])
    if "hpu" in vars(torch):
        del torch.hpu
    patch.setattr(torch, "hpu", bridge.hpu, raising=False)
    patch.setattr(is_lazy, "_is_lazy", lazy)
    bridge._accelerator.reset()
    return bridge._accelerator
