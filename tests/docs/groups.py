"""Documents by what their commands need, a file of tests each, which share a store, and so what is compiled.

A section that has a scene of its own is rehearsed by itself.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.docs.commands import ROOT, shown
from tests.docs.scenes import unit_of

OVERVIEWS = (
    "README.md", "docs/ci.md", "docs/cpu-server.md", "docs/install.md", "docs/quickstart.md", "docs/troubleshooting.md",
    "docs/tune-vllm.md",
)  # fmt: skip
CPU = ("docs/commands.md", "docs/cpu.md", "docs/disaggregated.md", "docs/guarantees.md", "docs/quantising.md")
MODELS = ("docs/encoders.md", "docs/lora.md", "docs/models.md")
XLA = ("docs/cuda.md", "docs/xla.md")
PLANS = (
    "docs/adding.md", "docs/deploying.md", "docs/environment.md", "docs/formats.md", "docs/planning.md",
    "docs/servers.md",
)  # fmt: skip
SHARING = ("docs/sharing.md",)
SERVING = ("docs/performance.md", "docs/serving.md")
DEVICES = ("docs/accelerators.md",)
GROUPS = (OVERVIEWS, CPU, MODELS, XLA, PLANS, SHARING, SERVING, DEVICES)


def units(group: tuple[str, ...]) -> list[Any]:
    """The documents of a group, and their sections with scenes; those that push to a registry need one."""
    found: dict[str, bool] = {}
    for name in group:
        for one in shown(ROOT / name):
            found[unit_of(one)] = found.get(unit_of(one), False) or "cache push oci://" in one.line
    return [pytest.param(unit, marks=pytest.mark.full if pushes else ()) for unit, pushes in found.items()]
