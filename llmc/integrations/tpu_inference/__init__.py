"""vLLM on Google TPU: the plug-in tpu-inference."""

from __future__ import annotations

from llmc.integrations.base import Integration, ServerDeployment

INTEGRATION = Integration(
    buckets="llmc.integrations.tpu_inference.buckets:TpuInference",
    logs={"tpu-steps": "llmc.integrations.tpu_inference.logs:TpuSteps"},
    deployment=ServerDeployment("", {"VLLM_XLA_CACHE_PATH": "/cache/jax"}),
)
