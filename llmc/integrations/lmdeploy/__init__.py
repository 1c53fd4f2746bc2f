"""LMDeploy 0168eed (lmdeploy/metrics/loggers.py)."""

from __future__ import annotations

from llmc.integrations.base import Integration

INTEGRATION = Integration(
    histograms={
        "lmdeploy:request_prompt_tokens": "prompt",
        "lmdeploy:request_generation_tokens": "output",
    },
)
