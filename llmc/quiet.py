"""No library that llmc runs sends telemetry: it is turned off before they are imported.

onnxruntime 1.31 and later write reports into the user's cache folder and send them from sessions. The clients of the
Hugging Face hub send usage data with their requests. OpenVINO's converter reports to Google Analytics, and Ray's
clusters report their use. Child processes inherit the variables. A variable that the user has set is not changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

TELEMETRY_OFF: Mapping[str, str] = MappingProxyType(
    {
        "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime, and what is built on it
        "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, and transformers through it
        "RAY_USAGE_STATS_ENABLED": "0",  # clusters that a process of llmc starts
        "DO_NOT_TRACK": "1",  # all programs that honour it
    }
)
"""Set when llmc is first imported."""


def silence() -> None:
    """Set the variables, for this process and its children."""
    for name, value in TELEMETRY_OFF.items():
        os.environ.setdefault(name, value)


def silence_converter() -> None:
    """Make OpenVINO's converter, if it is imported, run without its telemetry package."""
    modules: dict[str, Any] = sys.modules  # None for a module means: cannot be imported
    modules.setdefault("openvino_telemetry", None)


def of_tools() -> dict[str, str]:
    """The environment of other projects' tools: OpenVINO's converter sends nothing where CI is set."""
    return {**os.environ, "CI": "true"}
