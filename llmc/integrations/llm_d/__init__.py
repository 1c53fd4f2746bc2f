"""The endpoint picker of Gateway API's inference extension and llm-d, under its three names."""

from __future__ import annotations

from llmc.integrations.base import Integration

INTEGRATION = Integration(
    histograms={
        "inference_model_input_tokens": "prompt",
        "inference_model_output_tokens": "output",
        "inference_objective_input_tokens": "prompt",
        "inference_objective_output_tokens": "output",
        "llm_d_epp_request_input_tokens": "prompt",
        "llm_d_epp_request_output_tokens": "output",
    },
)
