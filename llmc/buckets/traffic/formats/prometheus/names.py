"""What servers call their histograms of the prompt and output tokens of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Role = Literal["prompt", "output"]

HISTOGRAMS: Mapping[str, Role] = {
    "vllm:request_prompt_tokens": "prompt",
    "vllm:request_generation_tokens": "output",
    "sglang:prompt_tokens_histogram": "prompt",
    "sglang:generation_tokens_histogram": "output",
    "tgi_request_input_length": "prompt",
    "tgi_request_generated_tokens": "output",
    "lmdeploy:request_prompt_tokens": "prompt",
    "lmdeploy:request_generation_tokens": "output",
    "dynamo_frontend_input_sequence_tokens": "prompt",
    "dynamo_frontend_output_sequence_tokens": "output",
    "inference_model_input_tokens": "prompt",
    "inference_model_output_tokens": "output",
    "inference_objective_input_tokens": "prompt",
    "inference_objective_output_tokens": "output",
    "llm_d_epp_request_input_tokens": "prompt",
    "llm_d_epp_request_output_tokens": "output",
    "llmc:request_prompt_tokens": "prompt",
    "llmc:request_generation_tokens": "output",
}
"""vLLM 005a810 (vllm/v1/metrics/loggers.py), whose names the plug-ins for Gaudi, TPU and Neuron share; SGLang 00ae9c1
with --enable-metrics --collect-tokens-histogram (python/sglang/srt/metrics/collector.py); TGI (router/src/server.rs);
LMDeploy 0168eed (lmdeploy/metrics/loggers.py); Dynamo's frontend, as AIPerf's table of metrics lists it; the endpoint
picker of Gateway API's inference extension under its three names; llmc itself."""

TOKEN_TYPES: Mapping[str, Mapping[str, Role]] = {
    f"{name}{unit}": {"input": "prompt", "output": "output", "completion": "output"}
    for name in ("gen_ai_client_token_usage", "gen_ai_server_token_usage")
    for unit in ("", "_tokens", "_token")
}
"""OpenTelemetry's gen_ai.client.token.usage (docs/gen-ai/gen-ai-metrics.md): one histogram, told apart by a label."""

TOKEN_TYPE = "gen_ai_token_type"  # noqa: S105 - the name of a label

BUCKET, SUM, COUNT = "_bucket", "_sum", "_count"

QUERY = '{__name__=~"vllm:request_(prompt|generation)_tokens_(bucket|sum|count)"}'


class Series(NamedTuple):
    """One series of a histogram: which lengths it counts, of which family, and what of them."""

    role: Role
    family: str
    part: str


def series(name: str, labels: Mapping[str, str]) -> Series | None:
    """What the series `name` with `labels` tells of; None for any other series."""
    for part in (BUCKET, SUM, COUNT):
        if name.endswith(part):
            family = name.removesuffix(part)
            role = HISTOGRAMS.get(family)
            if role is None and family in TOKEN_TYPES:
                role = TOKEN_TYPES[family].get(labels.get(TOKEN_TYPE, ""))
            return None if role is None else Series(role, family, part)
    return None


def families() -> list[str]:
    """The histograms that are known, for messages."""
    return [*HISTOGRAMS, "gen_ai_client_token_usage"]
