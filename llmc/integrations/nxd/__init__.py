"""NxD Inference (neuronx-distributed-inference), the predecessor of vLLM Neuron."""

from __future__ import annotations

from llmc.integrations.base import Integration

INTEGRATION = Integration(
    buckets="llmc.integrations.nxd.buckets:Nxd",
)
