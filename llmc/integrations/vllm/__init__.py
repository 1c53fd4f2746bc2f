"""vLLM, on CUDA unless one of its plug-ins has a package here."""

from __future__ import annotations

from llmc.integrations.base import Integration, ServerDeployment

INTEGRATION = Integration(
    buckets="llmc.integrations.vllm.buckets:Vllm",
    caches={"vllm": "llmc.integrations.vllm.cache:VllmCache"},
    logs={
        "vllm-requests": "llmc.integrations.vllm.logs:VllmRequests",
        "vllm-cudagraphs": "llmc.integrations.vllm.logs:VllmCudagraphs",
        "vllm-batchsizes": "llmc.integrations.vllm.logs:VllmBatchSizes",
    },
    histograms={"vllm:request_prompt_tokens": "prompt", "vllm:request_generation_tokens": "output"},
    cached=("vllm:prompt_tokens_cached_total", "vllm:prefix_cache_hits_total"),
    deployment=ServerDeployment("inductor", {"VLLM_CACHE_ROOT": "/cache/vllm"}),
)
