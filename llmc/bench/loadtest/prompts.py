"""Prompts of a wanted number of tokens, each different from its first token on, for a tokenizer that is not here.

Text is made of words that are one token each in nearly every vocabulary. How many tokens a server really counts for
them, and how many it adds (a beginning token, a chat template), is found by asking it: `Calibration.fit`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_WORDS = """
the of and to in is was for on that with as by at from it his an were are which this also be had or has first one
their its after new who they two her she been other when all time would there more some into only over such made
about between out up then later many most where through during world city being years before under these him them
year three may well second used no so part can than state early main known called since while several will each
number because great same if any not however both until against life work high long name day set game place house
home water school group line power war age death son old man end best field area left right side land small large
top level total open show play point road river island south north east west head hand air force army king public
social local party music book series film song story character system family country government history law order
century university church company service team season member president days times men women children people down
back near last next former young common final free full human natural original modern
"""
WORDS = tuple(_WORDS.split())
"""Common English words, each once."""


@dataclass(frozen=True)
class Calibration:
    """A text of n words has about `added` + n · `per_word` tokens."""

    added: float = 0.0
    per_word: float = 1.0

    @classmethod
    def fit(cls, few: tuple[int, int], many: tuple[int, int]) -> Calibration:
        """From two counted texts, as (words, tokens)."""
        per_word = max((many[1] - few[1]) / (many[0] - few[0]), 0.1)
        return cls(few[1] - per_word * few[0], per_word)

    def words(self, tokens: int) -> int:
        """How many words have about `tokens` tokens, at least 1."""
        return max(1, round((tokens - self.added) / self.per_word))


def text(words: int, draw: random.Random) -> str:
    """So many random words."""
    return " ".join(draw.choices(WORDS, k=words))


class Prompts:
    """Makes prompts: texts, or lists of token ids where `ids` says which to draw from.

    The first `shared` (0 … 1) of each prompt is the same for all; the rest is drawn for each, so that nothing else of
    it can be in a prefix cache. The prompt of a given index and length depends on `seed` alone.
    """

    def __init__(
        self,
        calibration: Calibration | None = None,
        ids: Sequence[int] | None = None,
        shared: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._calibration = calibration or Calibration()
        self._ids = ids
        self._shared = shared
        self._seed = seed

    def make(self, index: int, tokens: int) -> str | list[int]:
        """The prompt of request `index`, of about `tokens` tokens; exactly so many when made of ids."""
        common = random.Random(f"shared {self._seed}")  # noqa: S311 - a workload, not a secret
        own = random.Random(f"prompt {self._seed} {index}")  # noqa: S311 - a workload, not a secret
        if self._ids is not None:
            prefix = round(tokens * self._shared)
            return common.choices(self._ids, k=prefix) + own.choices(self._ids, k=tokens - prefix)
        words = self._calibration.words(tokens)
        prefix = round(words * self._shared)
        return " ".join(common.choices(WORDS, k=prefix) + own.choices(WORDS, k=words - prefix))
