"""vLLM on AWS Trainium: the plug-in vLLM Neuron."""

from __future__ import annotations

from llmc.integrations.base import Integration, ServerDeployment

INTEGRATION = Integration(
    buckets="llmc.integrations.vllm_neuron.buckets:VllmNeuron",
    caches={"vllm-neuron": "llmc.integrations.vllm_neuron.cache:VllmNeuronCache"},
    deployment=ServerDeployment("neuron", {"VLLM_CACHE_ROOT": "/cache/vllm"}),
)
