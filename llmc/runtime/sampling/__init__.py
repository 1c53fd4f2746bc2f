"""From logits to token ids.

`SamplingParams` says how a request wants its text. A `SequenceSampler` carries what one sequence needs between steps:
its random generator, the tokens it has seen, how many it has produced. `sample` picks one token for each row of a
batch; `sample_top` does so from the largest logits alone.

A row is drawn in vLLM's order: logit_bias and penalties, masks (constraint, allowed_token_ids, bad_words, min_tokens),
temperature, min_p, top_k, top_p, then typical_p, draw. Ties are broken by the lower id, so that greedy, top_k=1 and a
top_p near 0 agree. Each row uses its own generator for exactly one number a token and arithmetic on that row alone:
with a seed, the result does not depend on the batch around it.
"""

from llmc.runtime.sampling.batch import Samples, sample, sample_top
from llmc.runtime.sampling.constraint import Constraint
from llmc.runtime.sampling.params import (
    GREEDY_BELOW,
    MAX_CHOICES,
    MAX_LOGPROBS,
    RequestOutputKind,
    SamplingParams,
)
from llmc.runtime.sampling.seen import bad_word_ids
from llmc.runtime.sampling.sequence import SequenceSampler
from llmc.runtime.sampling.structured import GuidedDecodingParams, StructuredOutputsParams
from llmc.runtime.sampling.top import TopLogits

__all__ = [
    "GREEDY_BELOW",
    "MAX_CHOICES",
    "MAX_LOGPROBS",
    "Constraint",
    "GuidedDecodingParams",
    "RequestOutputKind",
    "Samples",
    "SamplingParams",
    "SequenceSampler",
    "StructuredOutputsParams",
    "TopLogits",
    "bad_word_ids",
    "sample",
    "sample_top",
]
