"""What a manifest records of a compile's options says what it was compiled with, for every target."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.resolve import recorded_options
from llmc.compiler.targets import devices, open_target
from llmc.compiler.targets.base import Target
from llmc.compiler.targets.onnxruntime import target as onnxruntime
from llmc.compiler.targets.openvino import target as openvino
from llmc.errors import InputError

DEVICES = sorted({*devices(), "tpu:v5e-2x2", "cuda:h100", "openvino:GPU"} - {"tpu", "cuda"})
REQUESTED: dict[str, dict[str, Any]] = {
    "defaults": {}, "specialised": {"specialise": True}, "top": {"sample_top_k": 4}, "bf16": {"dtype": "bf16"},
    "u8 cache": {"kv_cache_dtype": "u8"}, "groups": {"group_size": 64}, "runtime's kernels": {"kernels": "onnxruntime"},
    "llmc's kernels": {"kernels": "llmc"}, "parallel": {"tensor_parallel": 2}, "slots": {"cache_slots": 8},
    "kernel": {"attention": "pallas"},
}  # fmt: skip


def manifest_of(device: str, target: Target, options: CompileOptions) -> Any:
    """As the pipeline writes it, and a manifest is read."""
    basic = {"quantize": options.quantize, "dtype": options.dtype, "specialise": options.specialise}
    found = {**basic, **options.extensions, **target.recorded(options).options}
    return SimpleNamespace(device=device, options=json.loads(json.dumps(found)))


@pytest.mark.parametrize("quantize", [None, "none", "int8", "int4", "keep"])
@pytest.mark.parametrize("device", DEVICES)
def test_options_come_back_from_the_manifest(
    device: str, quantize: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (onnxruntime, openvino):
        monkeypatch.setattr(module, "cpu_features", lambda: ("x86_64", "avx512_bf16", *KERNEL_SETS[0].features))
    target, tried = open_target(device), 0
    for extra in REQUESTED.values():
        try:
            options = target.configure(CompileOptions.of(device=device, quantize=quantize, **extra))
        except InputError:  # not for this device
            continue
        tried += 1
        found = recorded_options(manifest_of(device, target, options), target)
        memory = {"specialise_memory": found.get("specialise_memory")}  # written with its default, too
        assert found == options.changed(**memory)
        assert target.verification.limits(found) == target.verification.limits(options)
    assert tried or quantize not in (None, "none")
