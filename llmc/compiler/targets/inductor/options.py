"""AOTInductor's compile options: `--inductor-mode`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.compiler.options import Option

MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "max-autotune": {"max_autotune": True, "coordinate_descent_tuning": True},
}
"""Values of torch._inductor.config, by mode name of torch.compile: torch/_inductor/__init__.py, list_mode_options, at
v2.11.0 and v2.13.0. The executor captures CUDA graphs, never Inductor.
"""

MODE: Option[str] = Option(
    "inductor_mode", str, "default",
    "How Inductor selects kernels on the GPU: max-autotune times several for each matmul.",
    choices=tuple(MODES), shapes_executable=False, what="Inductor mode",
)  # fmt: skip
SECONDS: Option[int] = Option(
    "inductor_timeout", int, 3600, "Seconds that AOTInductor may take for one step.", metavar="N", least=1,
    shapes_executable=False,
)  # fmt: skip


def configs(mode: str) -> Mapping[str, Any]:
    """Return the values of torch._inductor.config."""
    return {**MODES[mode], "triton.cudagraphs": False}
