"""The length of a sequence's drafts, by the success of its earlier drafts.

A failed draft makes its step longer than necessary. So drafts get shorter where they are seldom accepted:

- at first as many tokens as are allowed; after a draft that was accepted whole, twice as many as before, up to that;
- half as many after a draft without an accepted token. After a failed draft of one token, nothing is drafted for 2
  tokens, after the next one for 4, up to LONGEST_PAUSE. Any accepted token resets the pause;
- as many as before after a draft that was accepted in part.
"""

from __future__ import annotations

from array import array

from llmc.runtime.engine.speculation.config import SpeculativeConfig
from llmc.runtime.engine.speculation.ngrams import NgramIndex

LONGEST_PAUSE = 32
"""Tokens; if every draft fails, one step in 33 is longer."""


class SequenceDrafter:
    """Drafts for one sequence. `propose` is called at each of its decode steps, `verified` after those with a draft."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._index = NgramIndex(config.lookup_min, config.lookup_max)
        self._allowed = self._length = config.num_speculative_tokens
        self._pause = 1
        self._silent_until = 0

    def propose(self, tokens: array[int], most: int) -> list[int]:
        """At most `most` guesses of what follows `tokens`, the prompt and the answer so far."""
        if len(tokens) < self._silent_until:
            return []
        return self._index.lookup(tokens, min(most, self._length))

    def verified(self, length: int, drafted: int, held: int) -> None:
        """The first `held` of `drafted` guesses were right; the sequence has `length` tokens now."""
        if held:
            self._pause = 1
            if held == drafted:
                self._length = min(self._allowed, max(self._length, 2 * drafted))
        elif self._length > 1:
            self._length //= 2
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._silent_until = length + self._pause
