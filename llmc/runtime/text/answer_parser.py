"""Splits a model's text, as it arrives, into reasoning, content and tool calls, by the format of its chat template."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from llmc.runtime.text.chat_format import CHANNEL, MESSAGE, CallNotation, ChatFormat

MAX_DEPTH = 64
"""Levels of nested arguments that are read."""
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_CHANNEL_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", CHANNEL)
_SPECIAL_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_WORD = re.compile(r"[^\s,:\[\]{}\"]*")
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call of the function `name` begins; `index` counts the calls of an answer."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments of call `index`, which are the JSON text of an object."""

    index: int
    text: str


AnswerPart: TypeAlias = Content | Reasoning | CallStart | CallArguments
Functions: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by the function's name."""
_Say: TypeAlias = Callable[[str], None]
_Reads: TypeAlias = Generator[None, None, Any]
"""Reads text and waits, by yielding, where more is needed."""


class _NoCallError(Exception):
    """What is read is no call, or a malformed one."""


class _Reader:
    """Reads text that arrives in pieces. Methods that read are generators, which yield until more text is there."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept: int | None = None
        """Where the text begins that may be read again."""
        self._final = self._cut = False

    def _add(self, text: str) -> None:
        start = self._at if self._kept is None else self._kept
        self._text = self._text[start:] + text
        self._at -= start
        self._kept = None if self._kept is None else 0

    def _char(self) -> _Reads:
        """Return the next character without taking it; "" at the end."""
        while self._at >= len(self._text):
            if self._final:
                return ""
            yield
        return self._text[self._at]

    def _white(self, also: str = "") -> _Reads:
        """Take white space, and characters of `also`."""
        while (character := (yield from self._char())) and (character.isspace() or character in also):
            self._at += 1

    def _take(self, characters: str) -> _Reads:
        """Take white space and one of `characters`, and return it. Raises _NoCallError where another comes."""
        yield from self._white()
        character = yield from self._char()
        if not character or character not in characters:
            raise _NoCallError
        self._at += 1
        return character

    def _starts(self, mark: str) -> _Reads:
        """Whether the text continues with `mark`, which is not taken."""
        while len(self._text) - self._at < len(mark):
            if self._final or not mark.startswith(self._text[self._at :]):
                return False
            yield
        return self._text.startswith(mark, self._at)

    def _maybe(self, mark: str) -> _Reads:
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

    def _until(self, marks: Sequence[str], say: _Say) -> _Reads:
        """Take text up to the first of `marks`, and that mark; say what came before. None: the text ended."""
        while True:
            found_at = ((self._text.find(mark, self._at), -len(mark), mark) for mark in marks)
            found = min((at for at in found_at if at[0] >= 0), default=None)
            rest = self._text[self._at :]
            held = max((_held(rest, mark) for mark in marks), default=0)
            if found is not None and (self._final or len(self._text) - held > found[0]):  # no longer mark may begin
                before = self._text[self._at : found[0]]
                self._at = found[0] + len(found[2])
                say(before)
                return found[2]
            if self._final:
                self._at = len(self._text)
                say(rest[: len(rest) - held] if self._cut else rest)
                return None
            if found is None and len(rest) > held:
                self._at += len(rest) - held
                say(rest[: len(rest) - held])
            yield

    def _value(self, say: _Say, depth: int = 1) -> _Reads:
        """Read a JSON value and say it, with line breaks in texts escaped and Python's literals as JSON's.

        Raises _NoCallError for anything else.
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
            if isinstance(_loads(text), str):
                raise _NoCallError
            say(text)

    def _items(self, say: _Say, opening: str, depth: int) -> _Reads:
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
                    raise _NoCallError
                yield from self._string(say)
                yield from self._take(":")
                say(": ")
            yield from self._value(say, depth + 1)

    def _string(self, say: _Say) -> _Reads:
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
                while len(self._text) - stop < 2 and not self._final:
                    yield
                    stop = self._at
                piece, self._at = self._text[stop : stop + 2], stop + 2
                say(piece if len(piece) == 2 else "")
            else:
                self._at += 1
                say(json.dumps(self._text[stop])[1:-1])
        raise _NoCallError


class AnswerParser(_Reader):
    """Reads one answer; joined, the parts do not depend on how the text was split.

    functions   the tools of the request, or None to find no calls
    thinking    whether the prompt has opened a block of reasoning
    limit       calls beyond this number are left out

    Text without reasoning and calls is unchanged. White space around them is dropped. Marks inside reasoning are text.
    A malformed call is text, marks included, unless its arguments have begun.
    """

    def __init__(
        self, form: ChatFormat, functions: Functions | None = None, thinking: bool = False, limit: int | None = None
    ) -> None:
        super().__init__()
        self.calls = 0
        self._thinking = form.thinking
        self._notation = form.calls if functions is not None or form.in_channels else None
        self._functions = functions
        self._limit = limit
        self._pending = self._called = ""
        self._begun = 0
        self._space = ""
        self._parts: list[AnswerPart] = []
        self._machine = self._answer(thinking)
        next(self._machine)

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that are now certain."""
        self._add(text)
        return self._advance()

    def flush(self, cut: bool = False) -> list[AnswerPart]:
        """Return the rest; call once, at the end. `cut`: the answer was ended from outside, so a mark may be half."""
        self._final, self._cut = True, cut
        return self._advance()

    def _advance(self) -> list[AnswerPart]:
        next(self._machine)
        if self._final and self._space and not self._begun:
            self._parts.append(Content(self._space))
        found, self._parts = self._parts, []
        return _joined(found)

    def _answer(self, thinking: bool) -> Generator[None, None, None]:
        yield
        if self._notation is not None and self._notation.kind == "channels":
            yield from self._messages()
        else:
            yield from self._blocks(thinking)
        while True:
            yield

    def _blocks(self, thinking: bool) -> _Reads:
        opening, closing = self._thinking or ("", "")
        if closing and (thinking or (yield from self._maybe(opening))):
            yield from self._reason(closing)
        elif closing and (yield from self._maybe(closing)):  # the template has opened and closed it, or left it out
            yield from self._white()
        notation = self._notation
        marks = [] if notation is None else _tokens(notation.before + "\n" + notation.start)[:1]
        if notation is not None and not marks:
            yield from self._unmarked(notation)
        while (mark := (yield from self._until(marks, self._say))) is not None:
            if notation is not None:
                yield from self._marked(notation, mark)
            if closing and (yield from self._maybe(opening)):
                yield from self._reason(closing)

    def _reason(self, closing: str) -> _Reads:
        """Show reasoning up to its mark, without white space around it."""
        space = ""
        said = False

        def say(text: str) -> None:
            nonlocal space, said
            text = space + (text if said else text.lstrip())
            kept = text.rstrip()
            space = text[len(kept) :]
            if kept:
                said = True
                self._parts.append(Reasoning(kept))

        yield from self._until([closing], say)
        yield from self._white()

    def _messages(self) -> _Reads:
        """Read messages of OpenAI's Harmony format, each with a channel or a recipient."""
        if not (yield from self._starts(CHANNEL)) and not (yield from self._starts(" to=")):
            yield from self._until([CHANNEL], self._say)
        header: list[str] = []
        while (yield from self._until([MESSAGE], header.append)) is not None:
            to = re.search(r"to=functions\.([\w.-]+)", "".join(header))
            if to and self._functions is not None:
                self._pending = self._called = to[1]
                with contextlib.suppress(_NoCallError):
                    yield from self._arguments()
                yield from self._until(_CHANNEL_ENDS, _drop)
            elif "analysis" in "".join(header):
                yield from self._until(_CHANNEL_ENDS, lambda text: self._parts.append(Reasoning(text)))
            else:
                yield from self._until(_CHANNEL_ENDS, self._say)
            header.clear()

    def _unmarked(self, notation: CallNotation) -> _Reads:
        """Read an answer that consists of calls without marks, if it names tools of the request."""
        yield from self._maybe(_PYTHON_TAG)
        self._kept = self._at
        try:
            yield from self._white()
            yield from self._call(notation)
            while (yield from self._next(notation)):
                yield from self._call(notation)
        except _NoCallError:
            if not self._begun:
                self._at = self._kept
        self._kept = None

    def _next(self, notation: CallNotation) -> _Reads:
        """Take what lies between calls without marks; whether a call follows."""
        for mark in filter(None, (notation.between.strip(), ";", ",")):  # Llama models separate calls by semicolons
            if (yield from self._maybe(mark)):
                return True
        return notation.kind == "json" and (yield from self._starts("{"))

    def _marked(self, notation: CallNotation, mark: str) -> _Reads:
        """Read calls from their first mark to their last."""
        self._kept = self._at - len(mark)
        begun, first = self._begun, [mark]
        try:
            for token in _tokens(notation.before):
                if token not in first:
                    yield from self._require(token)
                first = []
            while True:
                for token in _tokens(notation.start):
                    if token not in first:
                        yield from self._require(token)
                    first = []
                yield from self._call(notation)
                for token in _tokens(notation.end):
                    yield from self._maybe(token)
                if not (yield from self._another(notation)):
                    break
        except _NoCallError:
            if self._begun == begun and not self._cut:
                raw = self._text[self._kept : self._at]
                self._say(raw)
            elif self._begun == begun:
                self._at = len(self._text)
        self._kept = None

    def _another(self, notation: CallNotation) -> _Reads:
        """Take what lies between calls under one mark; whether a call follows."""
        if not notation.before or notation.listed:
            yield from self._maybe((_tokens(notation.after) or [""])[0])
            return False
        start, after = _tokens(notation.start)[:1], _tokens(notation.after)[:1]
        if start and after:
            found = yield from self._until([*start, *after], _drop)
            self._at -= len(found) if found in start else 0
            return found in start
        if after and (yield from self._maybe(after[0])):
            return False
        yield from self._white()
        return notation.kind == "json" and (yield from self._char()) == "{"

    def _require(self, mark: str) -> _Reads:
        if (yield from self._until([mark], _drop)) is None:
            raise _NoCallError

    def _call(self, notation: CallNotation) -> _Reads:
        """Read a call, or a list of them."""
        match notation.kind:
            case "json":
                yield from self._objects(notation)
            case "named":
                yield from self._named(notation)
            case "tags":
                yield from self._tags(notation)
            case "python":
                yield from self._python()
            case _:
                yield from self._bare(notation)

    def _objects(self, notation: CallNotation) -> _Reads:
        """Read {"name": …, "arguments": …}, {NAME: {…}}, or a list of such objects."""
        if (yield from self._take("[{")) == "{":
            return (yield from self._object(notation))
        while True:
            yield from self._white(",")
            if (yield from self._take("{]")) == "]":
                return
            yield from self._object(notation)

    def _object(self, notation: CallNotation) -> _Reads:
        name, late, called = "", "", False
        while True:
            yield from self._white(",")
            if (yield from self._take('}"')) == "}":
                break
            self._at -= 1
            key = yield from self._read()
            yield from self._take(":")
            if not notation.name:
                self._name(key)
                yield from self._arguments()
                called = True
            elif key in (notation.arguments, "arguments", "parameters"):
                if name:
                    self._name(name)
                    yield from self._arguments()
                    called = True
                else:
                    late = yield from self._whole()
            elif key == "function" and (yield from self._maybe("{")):
                yield from self._object(notation)
                called = True
            else:
                value = yield from self._read()
                name = value if key in (notation.name, "name") and isinstance(value, str) else name
        if not called:
            self._name(name)
            self._argue(_normal(late or "{}"))

    def _named(self, notation: CallNotation) -> _Reads:
        name: list[str] = []
        found = yield from self._until([(_tokens(notation.name_end) or ["\n"])[0], "{"], name.append)
        if found is None:
            raise _NoCallError
        self._at -= found == "{"
        self._name(re.sub(r"^functions\.|:\d+$", "", "".join(name).strip()))
        yield from self._require("{")
        self._at -= 1
        yield from self._arguments()

    def _tags(self, notation: CallNotation) -> _Reads:
        """Read the name, and arguments between tags."""
        key, end = notation.key.strip(), (_tokens(notation.end) or _tokens(notation.after) or [""])[0]
        name: list[str] = []
        name_end = (_tokens(notation.name_end) or ["\n"])[0]
        found = yield from self._until([name_end, key, end], name.append)
        if found is None:
            raise _NoCallError
        self._at -= len(found) if found in (key, end) else 0
        self._name("".join(name).strip())
        before, mark = "{", None
        while (mark := (yield from self._until([key, end], _drop))) == key:
            key_text, text, stated = yield from self._tagged(notation)
            if text is None:
                break
            self._argue(f"{before}{json.dumps(key_text, ensure_ascii=False)}: {self._typed(text, key_text, stated)}")
            before = ", "
        self._at -= len(end) if mark == end else 0
        if not self._cut or mark == end:
            self._argue("{}" if before == "{" else "}")

    def _tagged(self, notation: CallNotation) -> _Reads:
        """Read one argument: its key, its text (None: cut), and what its tags say of its type."""
        key: list[str] = []
        stated: list[str] = []
        value: list[str] = []
        yield from self._until([notation.value[0].strip()], key.append)
        if notation.value[1]:
            yield from self._until([notation.value[1].strip()], stated.append)
        if (yield from self._until([notation.value_end.strip()], value.append)) is None and self._cut:
            return "", None, ""
        text = "".join(value)
        if "".join(notation.value).endswith("\n"):
            text = text.removeprefix("\n")
        if notation.value_end.startswith("\n"):
            text = text.removesuffix("\n")
        return "".join(key).strip(), text, "".join(stated)

    def _python(self) -> _Reads:
        """Read [f(a=1), g()], whose calls are shown once the list is complete."""
        yield from self._white()
        if (yield from self._char()) != "[":
            raise _NoCallError
        written: list[str] = []
        depth, quote = 0, ""
        while True:
            character = yield from self._char()
            if not character:
                raise _NoCallError
            self._at += 1
            written.append(character)
            if quote and character == "\\":
                written.append((yield from self._char()))
                self._at += 1
            elif character == quote:
                quote = ""
            elif not quote:
                quote = character if character in "'\"" else ""
                depth += (character in "[{(") - (character in ")}]")
                if not depth:
                    break
        for name, arguments in _python_calls("".join(written)[1:-1]):
            self._name(name)
            typed = (f"{json.dumps(key)}: {self._typed(text, key, '')}" for key, text in arguments)
            self._argue("{" + ", ".join(typed) + "}")

    def _bare(self, notation: CallNotation) -> _Reads:
        """Read NAME{key:value}, JSON without quotes around keys."""
        name: list[str] = []
        if (yield from self._until(["{"], name.append)) is None:
            raise _NoCallError
        self._at -= 1
        self._name("".join(name).strip())
        yield from self._bare_value(notation.quote, "", 1)

    def _bare_value(self, quote: str, key: str, depth: int) -> _Reads:
        yield from self._white()
        character = yield from self._char()
        if depth > MAX_DEPTH or not character:
            raise _NoCallError
        word: list[str] = []
        if character in ("{", "["):
            closing = "}" if character == "{" else "]"
            self._at += 1
            self._argue(character)
            first = True
            while not (yield from self._maybe(closing)):
                if not first:
                    yield from self._take(",")
                    self._argue(", ")
                first = False
                if character == "{":
                    word.clear()
                    if (yield from self._until([":"], word.append)) is None:
                        raise _NoCallError
                    inner = "".join(word).replace(quote, "").strip().strip('"')
                    self._argue(f"{json.dumps(inner, ensure_ascii=False)}: ")
                    key = inner if depth == 1 else ""
                yield from self._bare_value(quote, key, depth + 1)
            self._argue(closing)
        elif (yield from self._starts(quote)):
            self._at += len(quote)
            if (yield from self._until([quote], word.append)) is None:
                raise _NoCallError
            self._argue(self._typed("".join(word), key if depth == 2 else "", "string"))
        else:
            found = yield from self._until([",", "}", "]"], word.append)
            self._at -= bool(found)
            self._argue(self._typed("".join(word).strip(), key if depth == 2 else "", ""))

    def _arguments(self) -> _Reads:
        """Read and show arguments: an object, its JSON text as a string, null or an empty text."""
        yield from self._white()
        if (yield from self._char()) == "{":
            yield from self._value(self._argue)
        else:
            self._argue(_normal((yield from self._whole())))

    def _whole(self) -> _Reads:
        written: list[str] = []
        yield from self._value(written.append)
        return "".join(written)

    def _read(self) -> _Reads:
        return _loads((yield from self._whole()))

    def _name(self, name: str) -> None:
        """Note the call whose arguments follow.

        Raises _NoCallError for no name, and without marks for a name of no tool.
        """
        notation = self._notation
        unmarked = notation is not None and not (notation.before or notation.start)
        if not name or (unmarked and name not in (self._functions or {})):
            raise _NoCallError
        self._pending = self._called = name

    def _argue(self, text: str) -> None:
        """Show a piece of arguments, and before the first one that the call begins."""
        if self._pending:
            self._begun += 1
            self._space, self._kept = "", None
            if self._limit is None or self._begun <= self._limit:
                self.calls = self._begun
                self._parts.append(CallStart(self.calls - 1, self._pending))
            self._pending = ""
        if self.calls == self._begun:
            self._parts.append(CallArguments(self.calls - 1, text))

    def _typed(self, text: str, key: str, stated: str) -> str:
        """Return an argument that was written as bare text, as JSON: by its schema, else by what its tags state."""
        properties = (self._functions or {}).get(self._called, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        value = _written(text)
        if kind == "string" or (kind is None and stated.lower() in ("string", "true")):
            quoted = isinstance(value, str) and text.strip()[:1] in ("'", '"', "<") and not stated
            value = value if quoted else text
        elif isinstance(value, str) and kind is not None:
            value = _written(value)
        return json.dumps(value, ensure_ascii=False)

    def _say(self, text: str) -> None:
        """Show content up to its last white space, which is held back until more follows."""
        kept = text.rstrip()
        if kept:
            self._parts.append(Content(self._space + kept))
            self._space = text[len(kept) :]
        else:
            self._space += text


def _drop(_: str) -> None:
    """Text that belongs to no part."""


def _tokens(mark: str) -> list[str]:
    """A mark's parts between white space, of which models vary."""
    return mark.split()


def _held(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` may continue."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def _loads(text: str) -> Any:
    """A JSON text's value, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _normal(text: str) -> str:
    """Arguments as the JSON text of an object. Raises _NoCallError for another value."""
    value = _loads(text)
    if isinstance(value, str):  # encoded twice
        value = _loads(value) if value.strip() else {}
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise _NoCallError
    return json.dumps(value, ensure_ascii=False)


def _python_calls(text: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Names of f(a=1), g(), and their arguments as they are written. Raises _NoCallError for other text."""
    found = []
    for call in _split(text):
        match = re.fullmatch(r"([\w.-]+)\((.*)\)", call, re.DOTALL)
        if match is None:
            raise _NoCallError
        words = [re.fullmatch(r"(\w+)\s*=\s*(.*)", word, re.DOTALL) for word in _split(match[2])]
        found.append((match[1], [(word[1], word[2]) for word in words if word]))
        if None in words:
            raise _NoCallError
    return found


def _split(text: str) -> list[str]:
    """Parts of a text between commas that are outside quotes and brackets."""
    parts, depth, quote, start, skip = [], 0, "", 0, False
    for index, character in enumerate(text):
        if skip:
            skip = False
        elif quote:
            skip = character == "\\"
            quote = "" if character == quote else quote
        elif character == "," and not depth:
            parts.append(text[start:index].strip())
            start = index + 1
        else:
            quote = character if character in "'\"" else ""
            depth += (character in "[{(") - (character in ")}]")
    rest = text[start:].strip()
    return [*parts, rest] if rest else parts


def _written(text: str) -> Any:
    """The value of a literal as JSON or Python writes it; other text is itself."""
    text = text.strip()
    if text.startswith("<![CDATA[") and text.endswith("]]>"):
        return text[len("<![CDATA[") : -len("]]>")]
    value = _loads(_LITERALS.get(text, text))
    if value is text and text[:1] in ("'", '"', "[", "{", "("):
        try:
            return json.loads(json.dumps(ast.literal_eval(text.replace("\n", "\\n"))))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return text
    return value


def _joined(parts: Sequence[AnswerPart]) -> list[AnswerPart]:
    """Parts of which neighbours of one kind are one."""
    found: list[AnswerPart] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, CallStart) or type(part) is not type(last) or isinstance(last, CallStart):
            found.append(part)
        elif not isinstance(part, CallArguments) or part.index == getattr(last, "index", None):
            found[-1] = replace(last, text=last.text + part.text)
        else:
            found.append(part)
    return [part for part in found if isinstance(part, CallStart) or part.text]
