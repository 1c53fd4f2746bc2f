"""Installing the fake Gaudi SDK for one test, in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent
_modules: dict[str, Any] = {}
"""The fake's modules: torch keeps what they register, so they are imported once, and hidden between tests."""


def install(patch: pytest.MonkeyPatch, lazy: bool = False, **environment: str) -> Any:
    """A host with the SDK and a new card, until the test ends; `environment` as _card.py states it.

    Returns the fake's module `_card`.
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
    bridge._card.reset()
    return bridge._card
