"""OpenVINO GenAI on Intel NPUs."""

from __future__ import annotations

from llmc.integrations.base import Integration

INTEGRATION = Integration(
    buckets="llmc.integrations.openvino_genai.buckets:OpenvinoGenai",
)
