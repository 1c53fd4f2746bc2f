"""Documents by what their commands need, a file of tests each, which share a store, and so what is compiled."""

from __future__ import annotations

from pathlib import Path

from tests.docs.commands import ROOT

OVERVIEWS = (
    "README.md", "docs/first/ci.md", "docs/first/cpu-server.md", "docs/first/vllm.md", "docs/quickstart.md",
)  # fmt: skip
PLANS = (
    "docs/adding-a-strategy.md", "docs/adding-a-target.md", "docs/ci.md", "docs/deploying.md", "docs/fleet.md",
    "docs/keys.md", "docs/kubernetes.md", "docs/planning.md", "docs/servers.md", "docs/traffic.md",
    "docs/vllm-variables.md",
)  # fmt: skip
SHARING = ("docs/archives.md", "docs/foreign-caches.md", "docs/oci.md", "docs/signing.md")
SERVING = ("docs/loop.md", "docs/ray.md", "docs/serving.md", "docs/speculation.md")
DEVICES = ("docs/benchmarks.md", "docs/config-only.md", "docs/cuda-graphs.md", "docs/torch-xla.md")
GROUPS = (OVERVIEWS, PLANS, SHARING, SERVING, DEVICES)
NOT_YET = (
    "docs/calibration.md", "docs/certificates.md", "docs/checkpoints.md", "docs/commands.md", "docs/cuda.md",
    "docs/demo.md", "docs/encoders.md", "docs/finishing.md", "docs/hpu.md", "docs/hybrid.md", "docs/inductor.md",
    "docs/kernels.md", "docs/lora.md", "docs/lpu.md", "docs/neuron.md", "docs/openvino.md", "docs/sharing.md",
    "docs/tpu.md", "docs/warmup.md", "docs/xla.md",
)  # fmt: skip
"""Documents whose commands are parsed, and run with what they name missing, but not rehearsed."""


def paths(group: tuple[str, ...]) -> list[Path]:
    """The documents of a group."""
    return [ROOT / name for name in group]
