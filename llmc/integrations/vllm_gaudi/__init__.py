"""vLLM on Intel Gaudi: the restated planner of the plug-in vllm-gaudi, and Gaudi's recipe cache."""

from __future__ import annotations

from llmc.integrations.base import Integration, ServerDeployment

INTEGRATION = Integration(
    buckets="llmc.integrations.vllm_gaudi.buckets:VllmGaudi",
    caches={"gaudi": "llmc.integrations.vllm_gaudi.cache:GaudiCache"},
    logs={"vllm-gaudi": "llmc.integrations.vllm_gaudi.logs:VllmGaudiLog"},
    deployment=ServerDeployment("hpu", {"PT_HPU_RECIPE_CACHE_CONFIG": "/cache/recipes,false,8192"}),
)
