"""The bridge: its versions have to agree before anything of it can be used."""

from __future__ import annotations

import os
import sys

import torch
from habana_frameworks.torch import _accelerator
from habana_frameworks.torch.utils.internal import is_lazy

__version__ = _accelerator.VERSION

_built_for = os.environ.get("FAKE_HPU_TORCH", torch.__version__)
if _built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
    raise AssertionError(
        f"Error: Compile-time major/minor PyTorch version {_built_for} differs from run-time {torch.__version__}."
    )
is_lazy()

from habana_frameworks.torch import core, hpu, internal  # noqa: E402, F401
from habana_frameworks.torch.dynamo import compile_backend  # noqa: E402, F401
from habana_frameworks.torch.hpu import metrics  # noqa: E402, F401
from habana_frameworks.torch.internal import bridge_config  # noqa: E402, F401
from habana_frameworks.torch.utils import debug  # noqa: E402, F401

torch.hpu = hpu
sys.modules["torch.hpu"] = hpu
