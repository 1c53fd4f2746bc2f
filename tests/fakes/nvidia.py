"""A host with NVIDIA GPUs, for one test: NVML tells of them (pynvml.py)."""

from __future__ import annotations

import sys

import pytest

from tests.fakes import pynvml
from tests.fakes.pynvml import Device

H100 = Device()
H100_OTHER = Device(uuid="GPU-22222222-0000-0000-0000-000000000000")
L40S = Device("NVIDIA L40S", "GPU-33333333-0000-0000-0000-000000000000", (8, 9), 48 << 30)


def install(
    patch: pytest.MonkeyPatch, *gpus: Device, driver: str = "580.95.05", cuda: int = 13000, fails: int | None = None
) -> None:
    """These GPUs until the test ends, all of them visible; `cuda` as NVML says it (13000), `fails` what NVML fails
    with (a code of pynvml.py)."""
    patch.setitem(sys.modules, "pynvml", pynvml)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pynvml.set_host(*gpus, driver=driver, cuda=cuda, fails=fails)
