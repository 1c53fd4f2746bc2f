"""Text Generation Inference (router/src/server.rs)."""

from __future__ import annotations

from llmc.integrations.base import Integration

INTEGRATION = Integration(
    histograms={
        "tgi_request_input_length": "prompt",
        "tgi_request_generated_tokens": "output",
    },
)
