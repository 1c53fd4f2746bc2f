"""Token ids of texts and text pairs, limited to the model's length. Longer ones are rejected or truncated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from llmc.errors import ArtifactError, InputError
from llmc.runtime.text.bounds import UnboundedError, bounds_of
from llmc.runtime.text.token_width import token_width

if TYPE_CHECKING:
    from llmc.runtime.pooling.modules import PoolingDescription

WHOLE = -1
"""Truncate to the model's limit."""

Pair: TypeAlias = tuple[str, str]
Given: TypeAlias = "str | Pair | list[int]"


@dataclass(frozen=True)
class Encoded:
    """The ids of a text, and for each whether it belongs to the second text of a pair (1) or not (0)."""

    ids: list[int]
    types: list[int]


def most_tokens(cut: int | None, longest: int) -> int:
    """The largest number of tokens of a text: the model's `longest`, or fewer if `cut`. Raises InputError."""
    if cut is None or cut == WHOLE:
        return longest
    if cut < 1:
        raise InputError(f"truncate_prompt_tokens {cut} leaves no text; keep at least one token, or -1 for {longest}")
    return min(cut, longest)


def of_ids(ids: list[int], at: int, cut: int | None, longest: int) -> Encoded:
    """Given ids of input `at`, truncated by `cut`. Raises InputError if they are empty or too many."""
    most = most_tokens(cut, longest)
    if len(ids) > most and cut is None:
        raise _too_long(at, f"{len(ids)} tokens", longest)
    if not ids:
        raise _empty(at)
    return Encoded(ids[:most], [0] * min(len(ids), most))


class PoolingTokenizer:
    """A tokenizer.json that truncates texts at their end on request, and the longer text of a pair first.

    Raises ArtifactError for bytes that are not a tokenizer.json.
    """

    def __init__(self, data: bytes, description: PoolingDescription) -> None:
        from tokenizers import Tokenizer

        try:
            self._backend: Any = Tokenizer.from_buffer(data)
        except Exception as error:  # tokenizers raises bare Exception for a file that it cannot parse
            raise ArtifactError(f"tokenizer.json is damaged ({error}); compile the bundle again") from error
        bounds = bounds_of(self._backend)
        if not bounds.regular:
            raise UnboundedError("the time of its steps for a text has no known bound")
        self._most = bounds.most
        self._description = description
        self._width = token_width(self._backend)
        self._backend.no_padding()
        self._backend.no_truncation()

    def encode(self, given: Sequence[Given], prompt: str = "", cut: int | None = None) -> list[Encoded]:
        """Encode each text after `prompt`, and each pair; ids stay as given.

        `cut` keeps at most that many tokens of each, WHOLE the model's limit. Raises InputError for longer texts
        without `cut`, for non-Unicode text, and for empty input.
        """
        longest = self._description.max_length
        if not all(isinstance(one, str | tuple | list) for one in given):
            raise InputError("a text is not Unicode, or no text")
        texts = [(at, self._text(one, prompt)) for at, one in enumerate(given) if not isinstance(one, list)]
        for at, text in texts:
            size = len(text) if isinstance(text, str) else sum(map(len, text))
            if size > self._most:
                raise InputError(f"input {at} has {size} characters; this tokenizer takes at most {self._most} at once")
        if cut is None:
            for at, text in texts:
                self._require_short(at, text)
        else:
            self._backend.enable_truncation(most_tokens(cut, longest), strategy="longest_first")
        try:
            built = self._backend.encode_batch([text for _, text in texts])
        except (TypeError, UnicodeEncodeError) as error:
            raise InputError(f"a text is not Unicode, or no text: {error}") from error
        finally:
            self._backend.no_truncation()
        found = {at: Encoded(e.ids, e.type_ids) for (at, _), e in zip(texts, built, strict=True)}
        for at, one in enumerate(given):
            if isinstance(one, list):
                found[at] = of_ids(one, at, cut, longest)
            if not found[at].ids:
                raise _empty(at)
            if len(found[at].ids) > longest:
                raise _too_long(at, f"{len(found[at].ids)} tokens", longest)
        return [found[at] for at in range(len(given))]

    def _require_short(self, at: int, text: str | Pair) -> None:
        """Raise InputError for a text that is too long whatever its tokens are, without tokenizing it."""
        longest = self._description.max_length
        parts = (text,) if isinstance(text, str) else text
        if self._width is None or not all(isinstance(part, str) for part in parts):
            return
        if 4 * sum(map(len, parts)) > longest:  # a character has at most 4 bytes, and a token at least one
            least = sum(map(self._width.least_tokens, parts))
            if least > longest:
                raise _too_long(at, f"{sum(map(len, parts))} characters, which are at least {least} tokens", longest)

    def prompt_tokens(self, prompt: str) -> int:
        """Number of tokens that `prompt` takes at the beginning of a text, including special ones before it.

        Source: sentence-transformers 6.2.0, base/model.py (its prompt without the token that ends it).
        """
        if not prompt:
            return 0
        built = self._backend.encode(prompt)
        ends = bool(built.special_tokens_mask) and built.special_tokens_mask[-1] == 1
        return len(built.ids) - ends

    def _text(self, given: str | Pair, prompt: str) -> str | Pair:
        if isinstance(given, tuple):
            pair = given[0], given[1]
            return self._judged(pair) if self._description.template is not None else pair
        text = prompt + given
        text = text.strip() if self._description.strip else text
        return text.lower() if self._description.lowercase else text

    def _judged(self, pair: Pair) -> str:
        before, between, behind = self._description.template or ("", "", "")
        return f"{before}<Instruct>: {self._description.instruction}\n<Query>: {pair[0]}{between}{pair[1]}{behind}"


def _too_long(at: int, what: str, longest: int) -> InputError:
    return InputError(
        f"input {at} has {what}; this model takes at most {longest}: shorten it, or have it cut "
        "(truncate_prompt_tokens -1, --truncate)"
    )


def _empty(at: int) -> InputError:
    return InputError(f"input {at} is empty: it has no token")
