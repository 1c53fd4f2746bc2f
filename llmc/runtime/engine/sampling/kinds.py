"""The kinds of sampling that a warm-up and a certificate go through (buckets/capture/auxiliary.py), as parameters."""

from __future__ import annotations

from typing import Any

from llmc.buckets.capture.auxiliary import SAMPLING
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.engine.sampling.structured import StructuredOutputsParams


def sampling_params(kind: str, has_text: bool = True) -> SamplingParams:
    """SAMPLING[`kind`] as parameters of a request; without a tokenizer there are no words that could be bad."""
    given: dict[str, Any] = dict(SAMPLING[kind])
    if not has_text:
        given.pop("bad_words", None)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    return SamplingParams(**given)
