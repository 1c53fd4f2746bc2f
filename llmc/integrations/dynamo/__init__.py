"""NVIDIA Dynamo: its frontend, from AIPerf's table of metrics."""

from __future__ import annotations

from llmc.integrations.base import Integration

INTEGRATION = Integration(
    histograms={
        "dynamo_frontend_input_sequence_tokens": "prompt",
        "dynamo_frontend_output_sequence_tokens": "output",
    },
)
