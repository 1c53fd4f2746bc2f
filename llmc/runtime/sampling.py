"""From logits to token ids.

`SamplingParams` has vLLM's names and defaults. A `SequenceSampler` carries what one sequence needs between
steps: its random generator, the tokens it has seen, and how many it has produced. `sample` picks one token
for each row of a batch.

A row is drawn in vLLM's order: logit_bias and penalties, min_tokens, temperature, min_p, top_k, top_p, draw.
Ties are broken by the lower id, so that greedy, top_k=1 and a top_p near 0 agree. Each row uses its own
generator for exactly one number a token and arithmetic on that row alone: with a seed, the result does not
depend on the batch around it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.errors import InputError, LlmcError

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy, as in vLLM."""
_GROUPS = 64
_BLOCK = 256
_MASS_STEPS = (1e-2, 1e-4, 1e-6, 0.0)

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Raises InputError for a value that makes no sense.

    `stop` and `stop_token_ids` are tuples once constructed, and `top_k` is 0 where it was -1.
    """

    max_tokens: int | None = 16
    """Tokens to produce at most; None: as many as the context has room for."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the most probable tokens that together reach this probability, in (0, 1]."""
    top_k: int = 0
    """Keep this many most probable tokens; 0 or -1: all."""
    min_p: float = 0.0
    """Keep tokens at least this probable relative to the most probable, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in prompt and output, multiplies negative ones; over 1 discourages."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time a token is in the output, in [-2, 2]."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these ids, in [-100, 100]."""
    seed: int | None = None
    """Makes the draws repeatable; None: different every time."""
    stop: str | Sequence[str] | None = None
    """Text is cut before the first of these; see tokenizer.StopChecker."""
    stop_token_ids: Sequence[int] | None = None
    """Ids that end the text beside the model's own."""
    ignore_eos: bool = False
    """Continue after the model's end token."""
    min_tokens: int = 0
    """No end token (nor stop token) before this many tokens."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        self._set("temperature", _number("temperature", self.temperature, 0.0, math.inf))
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0, open_below=True))
        self._set("top_k", max(0, _integer("top_k", self.top_k, -1)))
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        penalty = _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_below=True)
        self._set("repetition_penalty", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _number(name, getattr(self, name), -2.0, 2.0))
        if self.logit_bias is not None:
            self._set("logit_bias", _bias(self.logit_bias))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1))
        self._set("stop", _stops(self.stop))
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        self._set(
            "stop_token_ids",
            tuple(_integer("stop_token_ids", index, 0) for index in _listed("stop_token_ids", ids)),
        )
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, without drawing."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return tuple(self.stop or ())

    @property
    def adjusts_logits(self) -> bool:
        """Whether penalties or biases apply."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
        )


def _integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{name} must be an integer, not {value!r:.80}") from None
    if number < least or (most is not None and number > most):
        raise InputError(
            f"{name} must be {f'at least {least}' if most is None else f'{least} to {most}'}, not {number}"
        )
    return number


def _number(name: str, value: Any, least: float, most: float, open_below: bool = False) -> float:
    try:
        if isinstance(value, bool | str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name} must be a number, not {value!r:.80}") from None
    if not (least <= number <= most) or math.isinf(number) or (open_below and number == least):
        above = "more than" if open_below else "at least"
        upper = "" if math.isinf(most) else f" and at most {most:g}"
        raise InputError(f"{name} must be {above} {least:g}{upper}, not {number}")
    return number


def _listed(name: str, value: Any) -> Iterable[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InputError(f"{name} must be a list, not {value!r:.80}")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else tuple(_listed("stop", value))
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise InputError(f"stop must hold texts that are not empty, not {stop!r:.80}")
    return stops


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InputError(f"logit_bias must map token ids to numbers, not {value!r:.80}")
    pairs = {}
    for key, bias in value.items():
        index = int(key) if isinstance(key, str) and key.isdecimal() else key  # JSON has no integer keys
        pairs[_integer("logit_bias token id", index, 0)] = _number("logit_bias", bias, -100.0, 100.0)
    return pairs


@dataclass
class SequenceSampler:
    """The state of one sequence between calls of `sample`.

    `prompt_ids` count for the repetition penalty; `end_ids` are the ids that end the sequence (the model's,
    unless ignore_eos, and stop_token_ids), refused until min_tokens. Raises InputError for an id in
    logit_bias or stop_token_ids that the vocabulary lacks.
    """

    params: SamplingParams
    vocab_size: int
    prompt_ids: Sequence[int] = ()
    end_ids: Sequence[int] = ()
    produced: int = field(default=0, init=False)
    """Tokens chosen so far."""

    def __post_init__(self) -> None:
        params = self.params
        named = [*(params.logit_bias or ()), *(params.stop_token_ids or ()), *self.prompt_ids, *self.end_ids]
        if named and not 0 <= min(named) <= max(named) < self.vocab_size:
            raise InputError(f"token id {max(named)} is not below the vocabulary size {self.vocab_size}")
        self._greedy, self._adjusts = params.greedy, params.adjusts_logits
        self._end = np.array(sorted({*self.end_ids, *(params.stop_token_ids or ())}), np.int64)
        self._random = None if params.greedy else np.random.Generator(np.random.PCG64(_seed(params.seed)))
        self._bias_ids = np.array(list(params.logit_bias or ()), np.int64)
        self._bias = np.array(list((params.logit_bias or {}).values()), np.float32)
        self._counts = np.zeros(self.vocab_size if self._adjusts else 0, np.int32)
        self._seen = np.zeros(self.vocab_size if self._adjusts else 0, np.bool_)
        if self._adjusts:
            self._seen[np.asarray(self.prompt_ids, np.int64)] = True
        self._seen_ids: list[int] = np.flatnonzero(self._seen).tolist()

    @property
    def plain(self) -> bool:
        """Whether the next token is simply the row's maximum."""
        return self._greedy and not self._adjusts and not self._holds_end

    @property
    def _holds_end(self) -> bool:
        return self.produced < self.params.min_tokens and self._end.size > 0

    def record(self, token_id: int) -> None:
        """Counts a chosen token; `sample` does it."""
        self.produced += 1
        if self._adjusts:
            self._counts[token_id] += 1
            if not self._seen[token_id]:
                self._seen[token_id] = True
                self._seen_ids.append(token_id)

    def choose(self, row: Logits) -> int:
        """The next id from logits [V], which stay as they are. Does not record it."""
        with np.errstate(over="ignore", under="ignore"):  # beyond float32 is as good as never
            if self._adjusts or self._holds_end:
                row = self._adjusted(row)
            return int(row.argmax()) if self._random is None else self._draw(row, self._random.random())

    def _adjusted(self, row: Logits) -> Logits:
        row, params = row.copy(), self.params
        if self._adjusts:
            row[self._bias_ids] += self._bias
            seen = np.array(self._seen_ids, np.int64)
            values, penalty = row[seen], np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / penalty, values * penalty)
            counts = self._counts[seen]
            values -= np.float32(params.frequency_penalty) * counts
            values -= np.float32(params.presence_penalty) * (counts > 0)
            row[seen] = values
        if self._holds_end:
            row[self._end] = -np.inf
        return row

    def _draw(self, row: Logits, uniform: float) -> int:
        """The token at `uniform`, in [0, 1), of the filtered distribution's cumulative sum in id order."""
        params = self.params
        largest = float(row.max())
        if not math.isfinite(largest):
            raise LlmcError(
                f"the largest logit is {largest}: the compiled graph or its weights are damaged; run `llmc verify`"
            )
        scaled = row - np.float32(largest)
        scaled /= np.float32(params.temperature)
        ids: Ids | None = None
        if 0 < params.top_k < scaled.size:
            ids = _largest(scaled, params.top_k)
            scaled = scaled[ids]
        weights = np.exp(scaled)
        if params.min_p > 0.0:
            kept = np.flatnonzero(weights >= params.min_p)
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        if params.top_p < 1.0:
            kept = _nucleus(weights, params.top_p)
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        index = _pick(weights, uniform)
        return index if ids is None else int(ids[index])


def sample(logits: Logits, sequences: Sequence[SequenceSampler]) -> Ids:
    """One token id a row, [B], recorded in its sequence.

    `logits` [B, V] float32 are only read; row i belongs to sequences[i]. When every row is plainly greedy
    this is one argmax. Raises LlmcError for NaN logits in a row that is drawn.
    """
    if all(sequence.plain for sequence in sequences):
        ids: Ids = logits.argmax(axis=1)
    else:
        chosen = [sequence.choose(row) for sequence, row in zip(sequences, logits, strict=True)]
        ids = np.array(chosen, np.int64)
    for sequence, token_id in zip(sequences, ids.tolist(), strict=True):
        sequence.record(token_id)
    return ids


def _seed(seed: int | None) -> int | None:
    """numpy takes no negative seeds: two's complement of 64 bits."""
    return None if seed is None else seed & ((1 << 64) - 1)


def _largest(values: Logits, count: int) -> Ids:
    """Ids of the `count` largest values, ascending; of equal values the lower ids.

    The count-th largest of the maxima of disjoint groups bounds the count-th largest value from below, and
    finding it reads the row once; only the few values above it are sorted.
    """
    width = values.size // _GROUPS
    if count <= width:
        maxima = values[: width * _GROUPS].reshape(_GROUPS, width).max(axis=0)
        candidates = np.flatnonzero(values >= np.partition(maxima, width - count)[width - count])
        values = values[candidates]
        best: Ids = candidates[_best(values, np.sort(values)[-count], count)]
        return best
    return _best(values, np.partition(values, values.size - count)[values.size - count], count)


def _nucleus(weights: Logits, top_p: float) -> Ids:
    """Indices, ascending, of the fewest largest weights that together reach the share `top_p`; at least one.

    `weights` are relative to the largest (1.0). Few tokens carry most of the mass, so a falling threshold
    finds them without sorting the whole row.
    """
    needed = top_p * float(weights.sum())
    candidates = weights
    for step in _MASS_STEPS:
        candidates = weights[np.flatnonzero(weights >= step)]  # 5 times as fast as weights[mask]
        if float(candidates.sum()) > needed:
            break
    ordered = np.sort(candidates)[::-1]
    count = min(int(ordered.cumsum(dtype=np.float64).searchsorted(needed)) + 1, ordered.size)
    return _best(weights, ordered[count - 1], count)


def _best(values: Logits, bound: np.float32, count: int) -> Ids:
    """Indices, ascending, of the values over `bound` and of the first equal ones, `count` in all."""
    kept: Ids = np.flatnonzero(values >= bound)
    if kept.size > count:
        equal = np.flatnonzero(values[kept] == bound)
        kept = np.delete(kept, equal[equal.size - (kept.size - count) :])
    return kept


def _pick(weights: Logits, uniform: float) -> int:
    """Inverse of the cumulative sum: first the block, then the index in it. Never one of weight 0."""
    starts = np.arange(0, weights.size, _BLOCK)
    blocks = np.add.reduceat(weights, starts).cumsum(dtype=np.float64)
    target = uniform * blocks[-1]
    block = min(int(blocks.searchsorted(target, side="right")), starts.size - 1)
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    rest = target - (blocks[block - 1] if block else 0.0)
    index = int(inside.cumsum(dtype=np.float64).searchsorted(rest, side="right"))
    if index == inside.size:  # the two sums differ in rounding: the last one that has any weight
        index = int(np.flatnonzero(inside)[-1])
    return block * _BLOCK + index
