"""One sequence's sampling state, such as its seen tokens, and the choice of its next token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from llmc.errors import InputError, VerificationError
from llmc.runtime.engine.sampling import filters
from llmc.runtime.engine.sampling.filters import Ids, Logits, LogitsRow
from llmc.runtime.engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from llmc.runtime.engine.sampling.constraints import GrammarConstraint

_NEVER = np.float32(-np.inf)
_HOTTEST = 1e30
_FACTOR = 1e30
"""Larger repetition penalties are clipped to this value, so that logits stay within float32."""


class SeenTokens:
    """Distinct ids in prompt and output, their counts in the output, and the penalties for them.

    The prompt matters only to repetition_penalty and is omitted without one.
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
        self._offsets = dict(zip(seen.tolist(), range(seen.size), strict=True))

    def copy(self) -> SeenTokens:
        """An independent copy."""
        built = copy(self)
        built._ids, built._counts, built._offsets = self._ids.copy(), self._counts.copy(), self._offsets.copy()
        return built

    def add(self, token_id: int) -> None:
        """Count an output token."""
        position = self._offsets.setdefault(token_id, self._size)
        if position == self._size:
            if position == self._ids.size:
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[position] = token_id
            self._size += 1
        self._counts[position] += 1

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
    """Token sequences that the output must not complete; each is blocked at its last token."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._always = [word[0] for word in words if len(word) == 1]
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append((tuple(word[:-1]), word[-1]))
        self._reach = max((len(word) for word in words), default=1) - 1
        self._last: list[int] = []

    def add(self, token_id: int) -> None:
        """Record an output token."""
        if self._reach:
            self._last = [*self._last, token_id][-self._reach :]

    def forbidden(self) -> list[int]:
        """The ids that would complete a word now."""
        if not self._last:
            return self._always
        last = tuple(self._last)
        begun = self._longer.get(last[-1], ())
        return self._always + [end for start, end in begun if last[-len(start) :] == start]


class SequenceSampler:
    """One sequence's sampling state: its generator, seen tokens and constraints.

    `prompt_ids` count for the repetition penalty. `end_ids` end the sequence (the model's, unless ignore_eos); like
    stop_token_ids, they are blocked until min_tokens. `bad_words` are the token sequences of params.bad_words
    (`bad_word_ids`). Raises InputError for an id outside the vocabulary and for bad words without ids.
    """

    def __init__(
        self, params: SamplingParams, vocab_size: int, prompt_ids: Sequence[int] = (), end_ids: Sequence[int] = (),
        constraint: GrammarConstraint | None = None, *, bad_words: Sequence[Sequence[int]] = (),
    ) -> None:  # fmt: skip
        self.params = params
        self.vocab_size = vocab_size
        self.end_ids = tuple(end_ids)
        self.constraint = constraint
        self.produced = 0
        """Tokens chosen so far."""
        self.failure: str | None = None
        """Why the sequence cannot continue: NaN logits, or a failed constraint."""
        self.unsound = False
        """Whether the logits are the reason; the sequence's cached tokens must not be reused then."""
        bias, allowed, stops = params.logit_bias or {}, params.allowed_token_ids, params.stop_token_ids or ()
        self._forced = params.forced_token_ids or ()
        for ids in (bias, stops, allowed or (), prompt_ids, end_ids, self._forced, *bad_words):
            if len(ids) and not 0 <= min(ids) <= max(ids) < vocab_size:
                found = min(ids) if min(ids) < 0 else max(ids)
                raise InputError(f"token id {found} is not below the vocabulary size {vocab_size}, nor from 0")
        if params.bad_words and not bad_words:
            raise InputError("bad_words need a tokenizer, and there is none here; use logit_bias")
        self.greedy = params.greedy
        self.logprobs = params.logprobs
        self._top_k = params.top_k if params.top_k < vocab_size else 0
        self._min_p, self._top_p, self._typical_p = params.min_p, params.top_p, params.typical_p
        self._temperature = np.float32(min(params.temperature, _HOTTEST))
        self._min_tokens = params.min_tokens
        self._random = None if self.greedy else np.random.Generator(np.random.PCG64(_seed(params.seed)))
        self._end = index([*end_ids, *stops])
        self._bias_ids = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)
        self._seen = SeenTokens(params, prompt_ids) if params.penalises else None
        self._bad = BadWords(bad_words) if bad_words else None
        self._allowed: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None
        if allowed is not None:
            self._allowed = np.zeros(vocab_size, np.bool_)
            self._allowed[index(allowed)] = True
        states = (self._seen, self._bad, self._allowed, constraint)
        self._adjusts = bool(bias or self._forced) or not all(state is None for state in states)

    def sibling(self, params: SamplingParams) -> SequenceSampler:
        """A sampler for another choice of the request, before the first token. `params` differ only in the seed."""
        built = copy(self)
        built.params = params
        built._random = None if self.greedy else np.random.Generator(np.random.PCG64(_seed(params.seed)))
        built._seen = None if self._seen is None else self._seen.copy()
        built._bad = copy(self._bad)
        built.constraint = None if self.constraint is None else self.constraint.copy()
        return built

    @property
    def plain(self) -> bool:
        """Whether the next token is simply the row's maximum."""
        return self.greedy and not self._adjusts and not self._holds_end

    @property
    def finished(self) -> bool:
        """Whether the constraint allows no further token."""
        return self.constraint is not None and self.constraint.finished

    @property
    def _holds_end(self) -> bool:
        return self.produced < self._min_tokens and self._end.size > 0

    def served_by_top(self, count: int) -> bool:
        """Whether the `count` largest logits usually suffice to choose the next token.

        They do not if min_p keeps more than these; `choose_among` detects that.
        """
        if self._adjusts or self.logprobs is not None or count < 1 or self._holds_end:
            return False
        if self.greedy:
            return True
        return self._typical_p == 1.0 and (0 < self._top_k <= count or self._min_p > 0.0)

    def record(self, token_id: int) -> None:
        """Record the chosen token; `sample` calls this."""
        self.produced += 1
        if self._adjusts:
            if self._seen is not None:
                self._seen.add(token_id)
            if self._bad is not None:
                self._bad.add(token_id)
            if self.constraint is not None:
                self.constraint.accept(token_id)
                self.failure = self.constraint.error

    def fail(self, error: Exception) -> None:
        """Mark the sequence as failed."""
        self.unsound = isinstance(error, VerificationError)
        self.failure = str(error) if self.unsound else f"{type(error).__name__}: {error}"

    def uniform(self) -> float:
        """This token's random number in [0, 1). Exactly one is drawn per token, whatever the filters. 0 if greedy."""
        return 0.0 if self._random is None else self._random.random()

    def choose(self, row: Logits, uniform: float) -> int:
        """Choose the next id from logits [V], unmodified. Raises VerificationError if the largest is not finite."""
        if self._adjusts or self._holds_end:
            check_largest(float(row.max()))  # masks could hide a NaN
            if self.produced < len(self._forced):
                return self._forced[self.produced]
            row = self._adjusted(row)
        if self._random is not None:
            return self._draw(row, uniform)
        token_id = int(row.argmax())
        check_largest(float(row[token_id]))
        return token_id

    def choose_among(self, values: Logits, ids: Ids, uniform: float) -> int | None:
        """Choose from the largest logits [K] only, best first; None if they do not suffice.

        Requires `served_by_top(K)`.
        """
        if not math.isfinite(float(values[0])):
            return None
        if self._random is None:
            return int(ids[0])
        largest, count = values[0], self._top_k
        if not 0 < count <= values.size:
            bound = filters.min_p_bound(float(largest), float(self._temperature), self._min_p)
            if float(values[-1]) >= bound and values.size < self.vocab_size:
                return None
            count = values.size
        by_id = np.argsort(ids[:count])
        return self._draw_among(values[by_id], ids[by_id], largest, uniform)

    def _draw(self, row: Logits, uniform: float) -> int:
        """The token at `uniform` in the filtered distribution's cumulative sum, in the order of ids."""
        if not (self._top_k or self._min_p):
            largest = row.max()
            check_largest(float(largest))
            return self._draw_among(row, None, largest, uniform)
        searched = LogitsRow(row)
        largest = searched.largest
        check_largest(float(largest))
        if self._top_k:
            ids = searched.top(self._top_k)
        else:
            ids = searched.above(filters.min_p_bound(float(largest), float(self._temperature), self._min_p))
        return self._draw_among(row[ids], ids, largest, uniform)

    def _draw_among(self, values: Logits, ids: Ids | None, largest: np.float32, uniform: float) -> int:
        """Draw from the ids left by top_k, ascending (None: all), and their logits."""
        weights = filters.weigh(values, largest, self._temperature)
        if self._min_p > 0.0:
            kept = np.flatnonzero(weights >= np.float32(self._min_p))
            ids, weights = _narrow(ids, kept), weights[kept]
        if self._top_p < 1.0:
            kept = filters.nucleus(weights, self._top_p)
            ids, weights = _narrow(ids, kept), weights[kept]
        if self._typical_p < 1.0:
            kept = filters.typical(weights, self._typical_p)
            ids, weights = _narrow(ids, kept), weights[kept]
        position = filters.pick(weights, uniform)
        return position if ids is None else int(ids[position])

    def _adjusted(self, row: Logits) -> Logits:
        """A copy with bias, penalties and masks applied. −inf is never chosen; at least one id always remains."""
        row = row.copy()
        if self._bias_ids.size:
            row[self._bias_ids] += self._bias
        if self._seen is not None:
            self._seen.penalise(row)
        mask = self._allowed if self.constraint is None else self.constraint.mask()
        if mask is not None:
            row = np.where(mask, row, _NEVER)
            if row.max() == _NEVER:  # the model gives none of them any probability: they are equally likely
                row[mask] = 0.0
        held = [] if self._bad is None else self._bad.forbidden()
        if held or self._holds_end:
            forbidden = index([*held, *self._end.tolist()]) if self._holds_end else index(held)
            before = row[forbidden]
            row[forbidden] = _NEVER
            if row.max() == _NEVER:  # nothing else is left
                row[forbidden] = before
        return row


def _narrow(ids: Ids | None, kept: Ids) -> Ids:
    return kept if ids is None else ids[kept]


def check_largest(largest: float) -> None:
    """Raise VerificationError unless a row's largest logit is finite."""
    if not math.isfinite(largest):
        raise VerificationError(
            f"the largest logit is {largest}: the compiled graph or its weights are damaged; run `llmc verify`"
        )


def _seed(seed: int | None) -> int | None:
    """A 64-bit two's complement seed, because numpy takes no negative seeds."""
    return None if seed is None else seed & ((1 << 64) - 1)


def bad_word_ids(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The token sequences of words, each at the start of the text and after a space.

    `encode` returns a text's ids without special tokens.
    """
    spellings = [text for word in words for text in (word, f" {word.lstrip()}")]
    return tuple(ids for ids in dict.fromkeys(tuple(encode(text)) for text in spellings) if ids)


def index(ids: Sequence[int]) -> Ids:
    """Distinct ids, ascending, for indexing a row."""
    return np.array(sorted(set(ids)), np.int64)
