"""Reads text that arrives in pieces: marks, names and JSON values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

from llmc.runtime.text.call_values import loaded

MAX_DEPTH = 64
"""Levels of nested arguments that are read."""
MAX_NAME = 128
"""Characters of a function's name; OpenAI takes 64."""
MAX_IDS = 96
"""Characters of the ids and numbers that a notation has between its marks."""
Say: TypeAlias = Callable[[str], None]
Reads: TypeAlias = Generator[None, None, Any]
"""Reads text and waits, by yielding, where more is needed."""

_LITERALS = {"True": "true", "False": "false", "None": "null", "NaN": "null", "Infinity": "null", "-Infinity": "null"}
_SPECIAL_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_WORD = re.compile(r"[^\s,:\[\]{}\"]*")
_OF_NAMES = re.compile(r"[\w.:/-]")


class NoCallError(Exception):
    """What is read is no call, or a malformed one."""


class TextReader:
    """Reads text that arrives in pieces. Methods that read are generators, which yield until more text is there."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept: int | None = None
        """Where the text begins that may be read again."""
        self._final = self._cut = False
        self._ended = False
        """Whether the text ended where more was needed."""

    def _add(self, text: str) -> None:
        start = self._at if self._kept is None else self._kept
        self._text = self._text[start:] + text
        self._at -= start
        self._kept = None if self._kept is None else 0

    def _char(self) -> Reads:
        """Return the next character without taking it; "" at the end."""
        while self._at >= len(self._text):
            if self._final:
                self._ended = True
                return ""
            yield
        return self._text[self._at]

    def _white(self, also: str = "") -> Reads:
        """Take white space, and characters of `also`."""
        while (character := (yield from self._char())) and (character.isspace() or character in also):
            self._at += 1

    def _take(self, characters: str) -> Reads:
        """Take white space and one of `characters`, and return it. Raises NoCallError where another comes."""
        yield from self._white()
        character = yield from self._char()
        if not character or character not in characters:
            raise NoCallError
        self._at += 1
        return character

    def _starts(self, mark: str) -> Reads:
        """Whether the text continues with `mark`, which is not taken."""
        while len(self._text) - self._at < len(mark):
            if not mark.startswith(self._text[self._at :]):
                return False
            if self._final:
                self._ended = True
                return False
            yield
        return self._text.startswith(mark, self._at)

    def _maybe(self, mark: str) -> Reads:
        """Take white space and `mark` if they come next; whether they did."""
        kept_before, self._kept = self._kept, self._at if self._kept is None else self._kept
        back = self._at - self._kept
        yield from self._white()
        found = bool(mark) and (yield from self._starts(mark))
        rest = self._text[self._at :]
        if not found and self._cut and rest and mark.startswith(rest):  # a mark of which the end was cut off
            found, self._at = True, len(self._text) - len(mark)
        self._at = self._at + len(mark) if found else self._kept + back
        self._kept = None if kept_before is None else self._kept
        return found

    def _until(self, marks: Sequence[str], say: Say) -> Reads:
        """Take text up to the first of `marks`, and that mark; say what came before. None: the text ended."""
        while True:
            found_at = ((self._text.find(mark, self._at), -len(mark), mark) for mark in marks)
            found = min((at for at in found_at if at[0] >= 0), default=None)
            length = len(self._text)
            held = max((_held(self._text, mark, length - self._at) for mark in marks), default=0)
            if found is not None and (self._final or length - held > found[0]):  # no longer mark may begin
                before = self._text[self._at : found[0]]
                self._at = found[0] + len(found[2])
                say(before)
                return found[2]
            if self._final:
                before = self._text[self._at : length - held if self._cut else length]
                self._at = length
                say(before)
                return None
            if found is None and length - held > self._at:
                before = self._text[self._at : length - held]
                self._at = length - held
                say(before)
            yield

    def _require(self, mark: str, ids: str = "") -> Reads:
        """Take `mark`, after white space and characters of `ids` alone, and digits and letters if there are any.

        Raises NoCallError where other text comes.
        """
        count = 0
        while not (yield from self._starts(mark)):
            character = yield from self._char()
            between = character.isspace() or (ids and (character in ids or character.isalnum()))
            if not character or not between or count > MAX_IDS:
                raise NoCallError
            self._at += 1
            count += not character.isspace()
        self._at += len(mark)

    def _word(self) -> Reads:
        """Take white space and the characters of a name, and return the name. Raises NoCallError for none."""
        yield from self._white()
        name: list[str] = []
        while (character := (yield from self._char())) and _OF_NAMES.match(character):
            name.append(character)
            self._at += 1
            if len(name) > MAX_NAME:
                raise NoCallError
        if not name:
            raise NoCallError
        return "".join(name)

    def _value(self, say: Say, depth: int = 1) -> Reads:
        """Read a JSON value and say it, with line breaks in texts escaped and Python's literals as JSON's.

        Raises NoCallError for anything else.
        """
        yield from self._white()
        character = yield from self._char()
        if character == '"':
            yield from self._string(say)
        elif character in ("{", "[") and depth <= MAX_DEPTH:
            yield from self._items(say, character, depth)
        else:
            word: list[str] = []
            while (yield from self._char()) and (match := _WORD.match(self._text, self._at)) and match[0]:
                word.append(match[0])
                self._at = match.end()
            text = _LITERALS.get("".join(word), "".join(word))
            if isinstance(loaded(text), str):
                raise NoCallError
            say(text)

    def _items(self, say: Say, opening: str, depth: int) -> Reads:
        closing = "}" if opening == "{" else "]"
        self._at += 1
        say(opening)
        first = True
        while True:
            yield from self._white()
            if (yield from self._char()) == closing:
                self._at += 1
                say(closing)
                return
            if not first:
                yield from self._take(",")
                say(", ")
            first = False
            if opening == "{":
                yield from self._white()
                if (yield from self._char()) != '"':
                    raise NoCallError
                yield from self._string(say)
                yield from self._take(":")
                say(": ")
            yield from self._value(say, depth + 1)

    def _string(self, say: Say) -> Reads:
        self._at += 1
        say('"')
        while (yield from self._char()):
            found = _SPECIAL_IN_STRING.search(self._text, self._at)
            stop = len(self._text) if found is None else found.start()
            if stop > self._at:
                piece, self._at = self._text[self._at : stop], stop
                say(piece)
            elif self._text[stop] == '"':
                self._at += 1
                say('"')
                return
            elif self._text[stop] == "\\":
                while self._text[self._at + 1 : self._at + 2] in ("", "u") and len(self._text) - self._at < 6:
                    if self._final:
                        break
                    yield  # the longest escape has six characters
                escape = _ESCAPE.match(self._text, self._at)
                self._at += 1 if escape is None else len(escape[0])
                say("\\\\" if escape is None else escape[0])  # a backslash that escapes nothing is one
            else:
                self._at += 1
                say(json.dumps(self._text[self._at - 1])[1:-1])
        raise NoCallError


def _held(text: str, mark: str, most: int) -> int:
    """Length of the longest end of `text`, of `most` characters, that `mark` may continue."""
    return next((n for n in range(min(len(mark) - 1, most), 0, -1) if text.endswith(mark[:n])), 0)


def drop(_: str) -> None:
    """Text that belongs to no part."""
