"""Guessing what comes next from what was there already, for steps that verify several tokens at once.

Prompt lookup (Saxena 2023; vLLM's method "ngram"): where the last few tokens of a sequence occurred before, in its
prompt or its answer, what followed them then is the draft. A decode row then has 1 + k tokens, the last one chosen and
k drafted ones; the engine samples after each of them in turn, with the sequence's own sampler, and stops at the first
token that is not the draft's. So each token comes from the logits that it would have come from without drafts, by the
same random number, penalties and constraint: speculation changes how many steps a text takes, never the text, as far
as the executor's logits of a token do not depend on the row's length (exactly so in f32 greedy decoding but for ties).
What was drafted and did not hold is still in the cache, where the next step, which starts below it, writes over it.

config.py: what is asked for; ngrams.py: the index; drafting.py: how far ahead one sequence looks.
"""

from llmc.runtime.engine.speculation.config import SpeculativeConfig
from llmc.runtime.engine.speculation.drafting import SequenceDrafter

__all__ = ["SequenceDrafter", "SpeculativeConfig"]
