"""Drafts the next tokens from earlier text of the sequence, for steps that verify several tokens at once.

Prompt lookup (Saxena 2023; vLLM's method "ngram"): where the last few tokens occurred before in the prompt or output,
the tokens that followed them are the draft. A decode row then has 1 + k tokens: the last chosen one and k drafts. The
engine samples after each of them in turn (`verify` in batched_core.py), with the sequence's own sampler, and stops at
the first mismatch. Each token is chosen from the same logits as without drafts, with the same random number, penalties
and constraint. Speculation therefore changes the number of steps but not the text, if the executor's logits of a token
do not depend on the row's length (in f32 greedy decoding they do not, except for ties). Rejected drafts remain in the
cache; the next step starts below them and overwrites them.

A rejected draft makes its step longer, so drafts get shorter if they are seldom accepted:

- They start at the allowed length. A fully accepted draft doubles the length, up to that limit.
- A draft without an accepted token halves it. After a failed draft of one token, nothing is drafted for 2 tokens,
  after the next one for 4, up to LONGEST_PAUSE. Any accepted token resets the pause.
- A partly accepted draft keeps it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from llmc.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from llmc.runtime.executors.base import Executor

METHOD = "ngram"
MAX_TOKENS = 64
LOOKUP_MAX = 4
LOOKUP_MIN = 2
LONGEST_PAUSE = 32
"""In tokens. If every draft fails, one step in 33 is longer."""
CANDIDATES = 32
"""Earlier occurrences that a look-up compares at most, latest first, which bounds it to microseconds."""
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
_Key = int | tuple[int, ...]


@dataclass(frozen=True)
class SpeculativeConfig:
    """Draft up to `num_speculative_tokens` (1 … MAX_TOKENS) tokens per step by prompt lookup.

    The last `prompt_lookup_max` tokens are searched, or fewer, down to `prompt_lookup_min`. If one is omitted it equals
    the other (vLLM's rule); if both are, they are LOOKUP_MAX and LOOKUP_MIN. Raises InputError for values out of range,
    and UnknownNameError for another method.
    """

    num_speculative_tokens: int
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    method: str = METHOD

    def __post_init__(self) -> None:
        if self.method != METHOD:
            raise UnknownNameError("speculation method", str(self.method), [METHOD])
        for field in fields(self)[:3]:
            value = getattr(self, field.name)
            given = value is not None or field.name == "num_speculative_tokens"
            if given and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InputError(f"speculative_config: {field.name} {value!r} must be a whole number, at least 1")
        if self.num_speculative_tokens > MAX_TOKENS:
            raise InputError(
                f"speculative_config: num_speculative_tokens {self.num_speculative_tokens} is more than {MAX_TOKENS}; "
                "such long drafts are seldom accepted; use 3 to 8"
            )
        if self.lookup_min > self.lookup_max:
            raise InputError(
                f"speculative_config: prompt_lookup_min {self.lookup_min} is more than prompt_lookup_max "
                f"{self.lookup_max}; swap them, or leave one out"
            )

    @property
    def lookup_max(self) -> int:
        """Length of the longest n-gram that is searched, in tokens."""
        return self.prompt_lookup_max or self.prompt_lookup_min or LOOKUP_MAX

    @property
    def lookup_min(self) -> int:
        """Length of the shortest n-gram that is searched, in tokens."""
        return self.prompt_lookup_min or self.prompt_lookup_max or LOOKUP_MIN

    @classmethod
    def of(cls, given: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig | None:
        """Parse the value of LLM(speculative_config=…); None stays None.

        vLLM's older spelling of the method, model "[ngram]" or "ngram", is accepted. Raises InputError for other keys.
        """
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise InputError(f"speculative_config must be a dict such as {_EXAMPLE}, not {type(given).__name__}")
        values = dict(given)
        if values.get("model") in (METHOD, f"[{METHOD}]"):
            values.setdefault("method", values.pop("model"))
            values["method"] = str(values["method"]).strip("[]")
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise InputError(
                    f"speculative_config knows no key {name!r}; known: {', '.join(known)}. Drafts come from the "
                    f"sequence's own tokens here, never from a second model: {_EXAMPLE}"
                )
        if "num_speculative_tokens" not in values:
            raise InputError(f"speculative_config needs num_speculative_tokens, such as {_EXAMPLE}")
        return cls(**values)

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """Parse vLLM's `--speculative-config JSON`; raises InputError."""
        try:
            given = json.loads(text)
        except ValueError as e:
            raise InputError(f"--speculative-config {text!r} is not JSON ({e}); give it as {_EXAMPLE}") from None
        found = cls.of(given) if isinstance(given, dict) else None
        if found is None:
            raise InputError(f"--speculative-config {text!r} is not an object; give it as {_EXAMPLE}")
        return found


class NgramIndex:
    """The n-grams of one growing sequence, of `shortest` … `longest` tokens.

    The longest match wins, and among equal lengths the latest, which the index finds first. vLLM's proposer takes the
    earliest; over SmolLM2-135M's outputs for 16 prompts the two needed equally many steps within 2%. A draft may
    continue into its own copy, as in LZ77: for "a b a b a" the draft is "b a b a …", at any distance. Each token has
    one entry: the shortest n-gram's latest end by its tokens, and from each end the previous one.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._latest: dict[_Key, int] = {}
        self._before = array("i")
        """By position: the previous end of the n-gram that ends there; −1: none."""

    def lookup(self, tokens: array[int], most: int) -> list[int]:
        """Up to `most` drafts of what follows `tokens`, which must extend the previous call's; [] for none.

        The first call indexes all tokens, a third of a microsecond each, later ones only new tokens.
        """
        last = len(tokens) - 1
        self._take(tokens, last)
        if most < 1 or last < self._shortest:
            return []
        end = self._latest.get(self._key(tokens, last), -1)
        best, found = 0, -1
        for _ in range(CANDIDATES):
            if end < 0 or best == self._longest:
                break
            length = self._match(tokens, end, last)
            if length > best:
                best, found = length, end
            end = self._before[end]
        if found < 0:
            return []
        guesses = tokens[found + 1 : found + 1 + most].tolist()
        period = last - found
        while len(guesses) < most:
            guesses.append(guesses[len(guesses) - period])
        return guesses

    def _take(self, tokens: array[int], stop: int) -> None:
        """Index the n-grams that end before `stop`."""
        latest, before, shortest = self._latest, self._before, self._shortest
        for end in range(len(before), stop):
            if end + 1 < shortest:
                before.append(-1)
                continue
            key = self._key(tokens, end)
            before.append(latest.get(key, -1))
            latest[key] = end

    def _key(self, tokens: array[int], end: int) -> _Key:
        if self._shortest == 1:
            return tokens[end]
        return tuple(tokens[end + 1 - self._shortest : end + 1])

    def _match(self, tokens: array[int], end: int, last: int) -> int:
        """How many tokens up to `end` equal those up to `last`. The shortest n-gram is known to match."""
        length = self._shortest
        while length < self._longest and length <= end and tokens[end - length] == tokens[last - length]:
            length += 1
        return length


class SequenceDrafter:
    """Drafts for one sequence. Call `propose` at each decode step, and `verified` after those with a draft."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._index = NgramIndex(config.lookup_min, config.lookup_max)
        self._allowed = self._length = config.num_speculative_tokens
        self._pause = 1
        self._silent_until = 0

    def propose(self, tokens: array[int], most: int) -> list[int]:
        """Draft at most `most` tokens to follow `tokens`, the prompt and the output so far."""
        if len(tokens) < self._silent_until:
            return []
        return self._index.lookup(tokens, min(most, self._length))

    def verified(self, length: int, drafted: int, held: int) -> None:
        """Report that the first `held` of `drafted` drafts were accepted; the sequence now has `length` tokens."""
        if held:
            self._pause = 1
            if held == drafted:
                self._length = min(self._allowed, max(self._length, 2 * drafted))
        elif self._length > 1:
            self._length //= 2
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._silent_until = length + self._pause


def require_verifiable(executor: Executor) -> None:
    """Raise InputError with a remedy unless the executor returns logits after each token of a row."""
    path = executor.bundle.path
    if executor.bundle.cache_shape.states:
        raise InputError(
            f"{path}: its model has recurrent state, which cannot drop a drafted token: leave speculation out"
        )
    if not executor.capabilities.exact:
        raise InputError(
            f"{path}: its graphs have fixed shapes, which take one token of a sequence per step, and speculation "
            "verifies several: leave speculation out, or compile without --specialise"
        )
    if not executor.capabilities.scores_each:
        raise InputError(
            f"{path}: its graphs return logits after the last token of a row only, and speculation verifies several: "
            "leave speculation out, or compile again, for device openvino or cpu, without --specialise"
        )
