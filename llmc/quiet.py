"""Turn off telemetry in the libraries that llmc uses, before they are imported.

onnxruntime 1.31 and later write reports into the user's cache folder and send them from sessions. Hugging Face hub
clients send usage data with their requests. OpenVINO's converter reports to Google Analytics, and Ray clusters report
their use. Child processes inherit the variables. Variables that the user has set are not changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

TELEMETRY_OFF: Mapping[str, str] = MappingProxyType(
    {
        "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime and packages built on it
        "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, and transformers through it
        "RAY_USAGE_STATS_ENABLED": "0",  # clusters that llmc starts
        "DO_NOT_TRACK": "1",  # all programs that honour it
    }
)
"""Variables set when llmc is first imported."""


def silence() -> None:
    """Set the variables for this process and its children."""
    for name, value in TELEMETRY_OFF.items():
        os.environ.setdefault(name, value)


def silence_converter() -> None:
    """Make OpenVINO's converter, if it is imported later, run without its telemetry package."""
    modules: dict[str, Any] = sys.modules  # a None entry makes the import fail
    modules.setdefault("openvino_telemetry", None)


def of_tools() -> dict[str, str]:
    """The environment for other projects' tools: OpenVINO's converter sends nothing if CI is set."""
    return {**os.environ, "CI": "true"}
