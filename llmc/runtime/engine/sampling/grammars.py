"""llguidance grammars, for both the generating process and the child process that tries a grammar first.

Imports only what a child needs, without numpy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from llmc.errors import ArtifactError, InputError
from llmc.platforms import install_line

LIMITS: Mapping[str, Any] = {
    "step_lexer_fuel": 100_000, "step_max_items": 20_000, "max_lexer_states": 10_000, "verbose_errors": False,
}  # fmt: skip
"""Limits for llguidance. With its defaults, one token could take a third of a second, or a text hundreds of MB."""
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""JSON's white space, bounded, so that a weak model cannot fill its output with blanks."""


def open_tokenizer(tokenizer_json: str, eos_token_ids: Sequence[int]) -> Any:
    """Open llguidance's tokenizer. Raises InputError if it is not installed, ArtifactError for an unsupported file.

    Its two parts hold the interpreter for 0.2 s and 0.1 s (49,152 tokens), so bundles of one model share it.
    """
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise InputError(
            f"structured outputs need llguidance, which is not installed; run: {install_line('serve')}"
        ) from error
    text = tokenizer_json.lstrip("\ufeff \t\r\n")
    if not text.startswith("{"):  # llguidance would read it as a file name
        raise ArtifactError("tokenizer.json holds no JSON object; compile the bundle again")
    try:
        return _opened(LLTokenizer, text, tuple(eos_token_ids))
    except ValueError as error:
        raise ArtifactError(f"structured outputs cannot use this tokenizer.json: {first_line(str(error))}") from error


@lru_cache(maxsize=1)
def _opened(kind: Any, text: str, eos_token_ids: tuple[int, ...]) -> Any:
    return kind(text, eos_token=list(eos_token_ids) or None, slices=[]).with_slices(kind.general_slices())


def build(tokenizer: Any, kind: str, form: Any) -> Any:
    """Build the matcher of a form (a text; texts for choice) of a `StructuredOutputsParams` kind, and its first mask.

    The first mask takes longest. Raises InputError with the reason for a form that cannot be followed. Time, memory and
    stack are not limited.
    """
    from llguidance import LLMatcher, LLParserLimits

    try:
        matcher: Any = LLMatcher(tokenizer, _source(kind, form), log_level=0, limits=LLParserLimits(**LIMITS))
    except ValueError as error:
        raise InputError(first_line(str(error))) from None
    if matcher.is_error():
        raise InputError(first_line(matcher.get_error()))
    matcher.compute_bitmask()
    if matcher.is_stopped():
        reason = first_line(matcher.get_error())
        raise InputError("no text meets it" if not reason or reason.startswith("NoExtension") else reason)
    return matcher


def _source(kind: str, form: Any) -> str:
    from llguidance import LLMatcher

    match kind:
        case "json" | "json_object":
            schema = form if kind == "json" else '{"type":"object"}'
            return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE}))
        case "regex":
            return str(LLMatcher.grammar_from_regex(form))
        case "choice":  # one terminal: with rules, each choice would be an item at once, and items are limited
            choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in form)
            return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}"))
        case _:
            return str(LLMatcher.grammar_from_lark(form))


def trial(tokenizer_json: str, eos_token_ids: Sequence[int]) -> Callable[[Mapping[str, Any]], None]:
    """Work for a child process: build what {"kind", "form"} names and discard it."""
    tokenizer = open_tokenizer(tokenizer_json, eos_token_ids)

    def tried(job: Mapping[str, Any]) -> None:
        try:
            build(tokenizer, job["kind"], job["form"])
        except (InputError, MemoryError):
            raise
        except BaseException as error:  # noqa: BLE001 - a panic of native code is one that is no Exception
            raise InputError(f"the grammar library fails on it: {first_line(str(error))}") from None

    return tried


def first_line(message: str) -> str:
    """The message as one line, without llguidance's state dump and excerpts."""
    head = re.split(r"<state>|<backtrace>|<non-verbose/>", message, maxsplit=1)[0]
    lines = [line.strip() for line in head.splitlines() if not re.match(r"\s*(\d+ \||\^)", line)]
    return " ".join(line for line in lines if line.strip("^ "))[:300]
