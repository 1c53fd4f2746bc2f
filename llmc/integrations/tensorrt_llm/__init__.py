"""TensorRT-LLM, its PyTorch backend."""

from __future__ import annotations

from llmc.integrations.base import Integration

INTEGRATION = Integration(
    buckets="llmc.integrations.tensorrt_llm.buckets:TensorrtLlm",
)
