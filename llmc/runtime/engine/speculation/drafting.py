"""How far ahead one sequence looks, by how its drafts did.

A draft that fails costs a step that is longer than it had to be, so that where guesses seldom hold few are made:

- as many tokens as are allowed at first, and twice as many as before, up to that, after a draft that held whole;
- half as many after a draft of which nothing held; a draft of one token that failed is followed by a pause of 2 tokens,
  the next one by 4, up to LONGEST_PAUSE, in which nothing is drafted. Any token that holds ends the row of pauses;
- as many as before after a draft of which some held.
"""

from __future__ import annotations

from array import array

from llmc.runtime.engine.speculation.config import SpeculativeConfig
from llmc.runtime.engine.speculation.ngrams import NgramIndex

LONGEST_PAUSE = 32
"""Tokens; what is guessed wrong all the time costs one longer step in 33 then."""


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
