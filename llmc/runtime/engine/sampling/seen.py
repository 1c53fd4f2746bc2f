"""What a sequence has seen, for penalties, and the words it must not complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import numpy as np

from llmc.runtime.engine.sampling.filters import Ids, Logits
from llmc.runtime.engine.sampling.params import SamplingParams

_FACTOR = 1e30
"""Stronger repetition penalties count as this one, so that logits stay within float32."""


class SeenTokens:
    """Distinct ids in prompt and output, how often each is in the output, and the penalties for them.

    The prompt matters to repetition_penalty only, and is left out without one.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._repetition = np.float32(min(max(params.repetition_penalty, 1 / _FACTOR), _FACTOR))
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        repeats = params.repetition_penalty != 1.0
        seen = index(prompt_ids if repeats else ())
        self._size = seen.size
        self._ids = np.concatenate([seen, np.zeros(64, np.int64)])
        self._counts = np.zeros(self._ids.size, np.float32)
        self._places = dict(zip(seen.tolist(), range(seen.size), strict=True))

    def copy(self) -> SeenTokens:
        """The same, to go on by itself."""
        made = copy(self)
        made._ids, made._counts, made._places = self._ids.copy(), self._counts.copy(), self._places.copy()
        return made

    def add(self, token_id: int) -> None:
        """Count a token of the output."""
        place = self._places.setdefault(token_id, self._size)
        if place == self._size:
            if place == self._ids.size:
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._size += 1
        self._counts[place] += 1

    def penalise(self, row: Logits) -> None:
        """Apply the penalties to logits [V], in place."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        values = row[ids]
        if self._repetition != 1.0:
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
        if self._frequency:
            values -= self._frequency * counts
        if self._presence:
            values -= self._presence * (counts > 0)
        row[ids] = values


class BadWords:
    """The token sequences that the output must not complete; each is held back at its last token."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._always = [word[0] for word in words if len(word) == 1]
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append((tuple(word[:-1]), word[-1]))
        self._reach = max((len(word) for word in words), default=1) - 1
        self._last: list[int] = []

    def add(self, token_id: int) -> None:
        """Take a token of the output."""
        if self._reach:
            self._last = [*self._last, token_id][-self._reach :]

    def forbidden(self) -> list[int]:
        """The ids that would complete a word now."""
        if not self._last:
            return self._always
        last = tuple(self._last)
        begun = self._longer.get(last[-1], ())
        return self._always + [end for start, end in begun if last[-len(start) :] == start]


def bad_word_ids(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The token sequences of words, each as at the start of the text and after a space.

    `encode` gives the ids of a text without special tokens.
    """
    spellings = [text for word in words for text in (word, f" {word.lstrip()}")]
    return tuple(ids for ids in dict.fromkeys(tuple(encode(text)) for text in spellings) if ids)


def index(ids: Sequence[int]) -> Ids:
    """Distinct ids, ascending, to index a row with."""
    return np.array(sorted(set(ids)), np.int64)
