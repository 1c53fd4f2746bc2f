"""Models of the servers that people run, by name, each imported when it is first asked for.

Other packages bring theirs in the entry-point group "llmc.servers" (registry.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.registry import Registry

if TYPE_CHECKING:
    from llmc.buckets.servers.base import Server

SERVERS = Registry(
    "server",
    "llmc.servers",
    {
        "nxd": "llmc.buckets.servers.nxd:Nxd",
        "openvino-genai": "llmc.buckets.servers.openvino_genai:OpenvinoGenai",
        "optimum-rbln": "llmc.buckets.servers.optimum_rbln:OptimumRbln",
        "qualcomm": "llmc.buckets.servers.qualcomm:Qualcomm",
        "sglang": "llmc.buckets.servers.sglang:Sglang",
        "tensorrt-llm": "llmc.buckets.servers.tensorrt_llm:TensorrtLlm",
        "tpu-inference": "llmc.buckets.servers.tpu_inference:TpuInference",
        "vllm": "llmc.buckets.servers.vllm:Vllm",
        "vllm-gaudi": "llmc.buckets.servers.vllm_gaudi.server:VllmGaudi",
        "vllm-neuron": "llmc.buckets.servers.vllm_neuron:VllmNeuron",
    },
)
"""Classes that take no arguments."""


def create(name: str) -> Server:
    """The model of the server `name`. Raises UnknownNameError, listing the known ones."""
    made: Server = SERVERS.get(name)()
    return made
