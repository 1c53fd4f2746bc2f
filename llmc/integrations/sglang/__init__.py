"""SGLang."""

from __future__ import annotations

from llmc.integrations.base import Integration

INTEGRATION = Integration(
    buckets="llmc.integrations.sglang.buckets:Sglang",
    histograms={"sglang:prompt_tokens_histogram": "prompt", "sglang:generation_tokens_histogram": "output"},
)
