"""Documents by what their commands need, a file of tests each, which share a store, and so what is compiled."""

from __future__ import annotations

from typing import Any

import pytest

from tests.docs.commands import ROOT

OVERVIEWS = (
    "README.md", "docs/first/ci.md", "docs/first/cpu-server.md", "docs/first/vllm.md", "docs/quickstart.md",
)  # fmt: skip
CPU = (
    "docs/calibration.md", "docs/certificates.md", "docs/commands.md", "docs/cpu.md", "docs/demo.md",
    "docs/hybrid.md", "docs/kernels.md", "docs/sharing.md", "docs/warmup.md",
)  # fmt: skip
OPENVINO = ("docs/checkpoints.md", "docs/lora.md", "docs/openvino.md")
XLA = ("docs/cuda.md", "docs/encoders.md", "docs/neuron.md", "docs/tpu.md", "docs/xla.md")
PLANS = (
    "docs/adding-a-strategy.md", "docs/adding-a-target.md", "docs/ci.md", "docs/deploying.md", "docs/fleet.md",
    "docs/keys.md", "docs/kubernetes.md", "docs/planning.md", "docs/servers.md", "docs/traffic.md",
    "docs/vllm-variables.md",
)  # fmt: skip
SHARING = ("docs/archives.md", "docs/foreign-caches.md", "docs/oci.md", "docs/signing.md")
SERVING = ("docs/loop.md", "docs/ray.md", "docs/serving.md", "docs/speculation.md")
DEVICES = (
    "docs/benchmarks.md", "docs/config-only.md", "docs/cuda-graphs.md", "docs/finishing.md", "docs/hpu.md",
    "docs/inductor.md", "docs/lpu.md", "docs/torch-xla.md",
)  # fmt: skip
GROUPS = (OVERVIEWS, CPU, OPENVINO, XLA, PLANS, SHARING, SERVING, DEVICES)


def paths(group: tuple[str, ...]) -> list[Any]:
    """The documents of a group, as parameters; those that push to a registry need one."""
    return [
        pytest.param(path, marks=pytest.mark.full if "llmc cache push oci://" in path.read_text() else ())
        for path in map(ROOT.joinpath, group)
    ]
