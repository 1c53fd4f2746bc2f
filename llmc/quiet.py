"""Nothing that llmc runs reports to its makers: telemetry of libraries is off before they are imported.

onnxruntime 1.31 and later write what they will send into the user's cache folder and send it from sessions; the clients
of the Hugging Face hub send what was used with what they ask for; OpenVINO's converter tells Google Analytics. Children
inherit the variables. One that the user has set stays as it is.
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
        "DO_NOT_TRACK": "1",  # whoever honours it
    }
)
"""Set when llmc is first imported."""


def silence() -> None:
    """Set the variables, for this process and its children."""
    for name, value in TELEMETRY_OFF.items():
        os.environ.setdefault(name, value)


def silence_converter() -> None:
    """Let OpenVINO's converter, where something imports it, do without its telemetry, as it can."""
    modules: dict[str, Any] = sys.modules  # None for a module means: cannot be imported
    modules.setdefault("openvino_telemetry", None)


def of_tools() -> dict[str, str]:
    """The environment of other projects' tools: OpenVINO's converter sends nothing where CI is set."""
    return {**os.environ, "CI": "true"}
