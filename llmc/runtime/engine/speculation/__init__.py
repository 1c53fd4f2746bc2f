"""Drafts of the next tokens from earlier text of the sequence, for steps that verify several tokens at once.

Prompt lookup (Saxena 2023; vLLM's method "ngram"): where the last few tokens of a sequence occurred before, in its
prompt or its answer, what followed them then is the draft. A decode row then has 1 + k tokens, the last one chosen and
k drafted ones; the engine samples after each of them in turn, with the sequence's own sampler, and stops at the first
token that is not the draft's. So each token is chosen from the same logits as without drafts, with the same random
number, penalties and constraint. Speculation changes the number of steps of a text and not the text, as long as the
executor's logits of a token do not depend on the row's length (in f32 greedy decoding they do not, except for ties).
Rejected drafts are still in the cache; the next step starts below them and overwrites them.

config.py: what is asked for; ngrams.py: the index; drafting.py: how far ahead one sequence looks.
"""

from llmc.runtime.engine.speculation.config import SpeculativeConfig
from llmc.runtime.engine.speculation.drafting import SequenceDrafter

__all__ = ["SequenceDrafter", "SpeculativeConfig"]
