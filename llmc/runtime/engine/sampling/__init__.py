"""Sampling: from logits to token ids.

`SamplingParams` are a request's parameters. A `SequenceSampler` holds one sequence's state between steps: its random
generator, its seen tokens and their number. `sample` picks one token per row of a batch; `sample_top` does so from the
largest logits only. Names are imported on first use, so creating parameters before a bundle opens is cheap.

Rows are processed in vLLM's order: logit_bias and penalties, masks (constraint, allowed_token_ids, bad_words,
min_tokens), temperature, min_p, top_k, top_p, then typical_p, draw. The lower id wins ties, so that greedy, top_k=1 and
a top_p near 0 agree. Each row draws exactly one number per token from its own generator, and its arithmetic uses that
row only. With a seed, the result does not depend on the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.runtime.engine.sampling.batch import sample as sample
    from llmc.runtime.engine.sampling.params import GuidedDecodingParams as GuidedDecodingParams
    from llmc.runtime.engine.sampling.params import RequestOutputKind as RequestOutputKind
    from llmc.runtime.engine.sampling.params import SamplingParams as SamplingParams
    from llmc.runtime.engine.sampling.params import StructuredOutputsParams as StructuredOutputsParams
    from llmc.runtime.engine.sampling.sampler import SequenceSampler as SequenceSampler

_HOMES = {
    "GuidedDecodingParams": "params",
    "RequestOutputKind": "params",
    "SamplingParams": "params",
    "SequenceSampler": "sampler",
    "StructuredOutputsParams": "params",
    "sample": "batch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
