"""Constraints from JSON schemas, regular expressions, choices and grammars, by llguidance."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.errors import ArtifactError, InputError
from llmc.runtime.sampling.constraint import Constraint
from llmc.runtime.sampling.structured import StructuredOutputsParams

__all__ = ["Constraint", "ConstraintFactory", "GrammarConstraint"]

MAX_GRAMMARS = 64
"""Compiled grammars to keep; a further one takes the place of the one that was not used for longest."""
MAX_SOURCE = 1 << 20
"""Characters that a schema, expression or grammar may have."""
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""JSON's white space, bounded: a weak model must not fill its tokens with blanks."""


class ConstraintFactory:
    """Makes constraints for texts in one model's tokens. Safe to share between threads.

    `tokenizer_json` is the text of a tokenizer.json, `vocab_size` the width of the logits (ids that the tokenizer lacks
    are never allowed), `eos_token_ids` end a text that is complete. Raises InputError where llguidance is not
    installed, ArtifactError for a tokenizer that it cannot take.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError as error:
            raise InputError(
                "structured outputs need llguidance, which is not installed; run: pip install 'llmc[serve]'"
            ) from error
        text = tokenizer_json.lstrip("\ufeff \t\r\n")
        if not text.startswith("{"):  # llguidance would take it for a file's name
            raise ArtifactError("tokenizer.json holds no JSON object; compile the bundle again")
        try:
            self._tokenizer: Any = LLTokenizer(text, eos_token=list(eos_token_ids) or None)
        except ValueError as error:
            raise ArtifactError(f"structured outputs cannot use this tokenizer.json: {_first(str(error))}") from error
        self._matcher: Any = LLMatcher
        self._vocab_size = vocab_size
        self._end_ids = tuple(index for index in eos_token_ids if index < vocab_size)
        # llguidance wants an end token: without one, the id that stands in for it is never allowed
        self._stand_ins = () if eos_token_ids else tuple(i for i in self._tokenizer.eos_tokens if i < vocab_size)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def compile(self, structured: StructuredOutputsParams) -> GrammarConstraint:
        """A new constraint, at the start of a text. Raises InputError, with the reason, for what cannot be followed."""
        source = self._source(structured)
        with self._lock:
            matcher = self._compiled.pop(source, None)
        if matcher is None:
            matcher = self._matcher(self._tokenizer, source, log_level=0)
            if matcher.is_error():
                raise InputError(
                    f"structured_outputs.{structured.kind} cannot be followed: {_first(matcher.get_error())}"
                )
            matcher.compute_bitmask()  # the first takes longest
            if matcher.is_error() or matcher.is_stopped():
                raise InputError(f"structured_outputs.{structured.kind} cannot be followed: no text meets it")
        with self._lock:
            self._compiled[source] = matcher
            while len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
            return GrammarConstraint(matcher.deep_copy(), self._vocab_size, self._end_ids, self._stand_ins)

    def _source(self, structured: StructuredOutputsParams) -> str:
        matcher, json_options = self._matcher, {"whitespace_pattern": _WHITESPACE}
        for text in (structured.json, structured.regex, structured.grammar, *(structured.choice or ())):
            if isinstance(text, str) and len(text) > MAX_SOURCE:
                raise InputError(
                    f"structured_outputs.{structured.kind} has {len(text)} characters; at most {MAX_SOURCE} are taken"
                )
        try:
            if structured.json is not None:
                return str(matcher.grammar_from_json_schema(structured.json, overrides=json_options))
            if structured.json_object:
                return str(matcher.grammar_from_json_schema('{"type":"object"}', overrides=json_options))
        except ValueError as error:
            raise InputError(f"structured_outputs.json cannot be followed: {_first(str(error))}") from None
        if structured.regex is not None:
            return str(matcher.grammar_from_regex(structured.regex))
        if structured.choice is not None:
            choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in structured.choice)
            return str(matcher.grammar_from_lark(f"start: {choices}"))
        return str(matcher.grammar_from_lark(structured.grammar))


class GrammarConstraint(Constraint):
    """Follows one text through a compiled grammar.

    Where there is no way on, the end tokens are allowed (any token, in a model without), and the constraint finishes.
    """

    def __init__(self, matcher: Any, vocab_size: int, end_ids: Sequence[int], never: Sequence[int] = ()) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._never = list(never)
        self._otherwise = list(end_ids) or slice(None)

    def mask(self) -> npt.NDArray[np.bool_]:
        """Which ids [V] may come next; the end tokens among them once the text is complete."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little").view(np.bool_)
        if allowed.size < self._vocab_size:
            allowed = np.concatenate([allowed, np.zeros(self._vocab_size - allowed.size, np.bool_)])
        allowed = allowed[: self._vocab_size]
        allowed[self._never] = False
        if not allowed.any():
            allowed[self._otherwise] = True
        return allowed

    def accept(self, token_id: int) -> None:
        """Take the token that was chosen; one that the mask forbids ends the constraint with an error."""
        self._matcher.consume_token(token_id)

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token may follow."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """What stopped it before the text was complete, such as a grammar that became too complex."""
        return _first(self._matcher.get_error()) if self._matcher.is_error() else None


def _first(message: str) -> str:
    """The message as one line, without llguidance's dump of its state and its excerpts."""
    head = re.split(r"<state>|<backtrace>", message, maxsplit=1)[0]
    lines = [line.strip() for line in head.splitlines() if not re.match(r"\s*(\d+ \||\^)", line)]
    return " ".join(line for line in lines if line.strip("^ "))[:300]
