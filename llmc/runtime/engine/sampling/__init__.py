"""From logits to token ids.

`SamplingParams` says how a request wants its text. A `SequenceSampler` carries what one sequence needs between steps:
its random generator, the tokens it has seen, how many it has produced. `sample` picks one token for each row of a
batch; `sample_top` does so from the largest logits alone. Names are imported when first used: a program that states
its parameters before it opens a bundle waits for nothing else.

A row is drawn in vLLM's order: logit_bias and penalties, masks (constraint, allowed_token_ids, bad_words, min_tokens),
temperature, min_p, top_k, top_p, then typical_p, draw. Ties are broken by the lower id, so that greedy, top_k=1 and a
top_p near 0 agree. Each row uses its own generator for exactly one number a token and arithmetic on that row alone:
with a seed, the result does not depend on the batch around it.
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
