"""Texts, and pairs of texts, as token ids of at most a model's length; longer ones are cut, as sentence-transformers
does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from llmc.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from llmc.runtime.pooling.modules import Description

Pair: TypeAlias = tuple[str, str]
Given: TypeAlias = "str | Pair | list[int]"


@dataclass(frozen=True)
class Encoded:
    """The ids of a text, and of each whether it is of the second text of a pair (1) or not (0)."""

    ids: list[int]
    types: list[int]


class Tokens:
    """A tokenizer.json that cuts texts to the length of `description`, from their end; of a pair, the longer first.

    Raises ArtifactError for bytes that are no tokenizer.json.
    """

    def __init__(self, data: bytes, description: Description) -> None:
        from tokenizers import Tokenizer

        try:
            self._backend: Any = Tokenizer.from_buffer(data)
        except Exception as error:  # tokenizers raises bare Exception for a file that it cannot parse
            raise ArtifactError(f"tokenizer.json is damaged ({error}); compile the bundle again") from error
        self._description = description
        self._most = 0
        self._backend.no_padding()
        self._cut(description.max_length)

    def _cut(self, most: int) -> None:
        if most != self._most:
            self._backend.enable_truncation(most, strategy="longest_first")
            self._most = most

    def encode(self, given: Sequence[Given], prompt: str = "", most: int | None = None) -> list[Encoded]:
        """The tokens of each text behind `prompt`, of each pair, or of ids as they are; at most `most` of them.

        Raises InputError for text that is not Unicode, for ids that are too many, and for nothing.
        """
        longest = min(most or self._description.max_length, self._description.max_length)
        texts = [(at, self._text(one, prompt)) for at, one in enumerate(given) if not isinstance(one, list)]
        self._cut(longest)
        try:
            made = self._backend.encode_batch([text for _, text in texts])
        except (TypeError, UnicodeEncodeError) as error:
            raise InputError(f"a text is not Unicode, or no text: {error}") from error
        found = {at: Encoded(e.ids, e.type_ids) for (at, _), e in zip(texts, made, strict=True)}
        for at, one in enumerate(given):
            if isinstance(one, list):
                if len(one) > longest:
                    raise InputError(f"input {at} has {len(one)} tokens; this model takes at most {longest}")
                found[at] = Encoded(one, [0] * len(one))
            if not found[at].ids:
                raise InputError(f"input {at} is empty: it has no token")
        return [found[at] for at in range(len(given))]

    def prompt_tokens(self, prompt: str) -> int:
        """Tokens that `prompt` takes at the beginning of a text, special ones before it included.

        Source: sentence-transformers 6.2.0, base/model.py (its prompt without the token that ends it).
        """
        if not prompt:
            return 0
        made = self._backend.encode(prompt)
        ends = bool(made.special_tokens_mask) and made.special_tokens_mask[-1] == 1
        return len(made.ids) - ends

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
