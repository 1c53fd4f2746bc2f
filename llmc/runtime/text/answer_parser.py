"""Splits a model's text, as it arrives, into reasoning, content and tool calls, by the format of its chat template."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from llmc.runtime.text.call_values import dumped, kinds, loaded, python_calls, typed, written
from llmc.runtime.text.chat_format import CHANNEL, MESSAGE, CallNotation, ChatFormat
from llmc.runtime.text.text_reader import MAX_DEPTH, NoCallError, Reads, TextReader, drop

_CHANNEL_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", CHANNEL)
_PYTHON_TAG = "<|python_tag|>"
_BETWEEN_IDS = "<>|:._-/[]"
"""Characters of the ids that some notations write between their marks, and of the marks of the ids."""
_PIECE = 4096
"""Characters that are read at once, so that the time of a long text is in proportion to it."""


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


class AnswerParser(TextReader):
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
        found: list[AnswerPart] = []
        for start in range(0, len(text), _PIECE):
            self._add(text[start : start + _PIECE])
            found += self._advance()
        return _joined(found)

    def flush(self, cut: bool = False) -> list[AnswerPart]:
        """Return the rest; call once, at the end. `cut`: the answer was ended from outside, so a mark may be half."""
        self._final, self._cut = True, cut
        return _joined(self._advance())

    def _advance(self) -> list[AnswerPart]:
        next(self._machine)
        if self._final and self._space and not self._begun:
            self._parts.append(Content(self._space))
        found, self._parts = self._parts, []
        return found

    def _answer(self, thinking: bool) -> Generator[None, None, None]:
        yield
        if self._notation is not None and self._notation.kind == "channels":
            yield from self._messages()
        else:
            yield from self._blocks(thinking)
        while True:
            yield

    def _blocks(self, thinking: bool) -> Reads:
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

    def _reason(self, closing: str) -> Reads:
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

    def _messages(self) -> Reads:
        """Read messages of OpenAI's Harmony format, each with a channel or a recipient."""
        if not (yield from self._starts(CHANNEL)) and not (yield from self._starts(" to=")):
            yield from self._until([CHANNEL], self._say)
        header: list[str] = []
        while (yield from self._until([MESSAGE], header.append)) is not None:
            to = re.search(r"to=functions\.([\w.:/-]+)", "".join(header))
            if to and self._functions is not None:
                with contextlib.suppress(NoCallError):
                    self._name(to[1])
                    yield from self._arguments()
                yield from self._until(_CHANNEL_ENDS, drop)
            elif "analysis" in "".join(header):
                yield from self._until(_CHANNEL_ENDS, lambda text: self._parts.append(Reasoning(text)))
            else:
                yield from self._until(_CHANNEL_ENDS, self._say)
            header.clear()

    def _unmarked(self, notation: CallNotation) -> Reads:
        """Read an answer that consists of calls without marks, if it names tools of the request."""
        yield from self._maybe(_PYTHON_TAG)
        self._kept, begun = self._at, 0
        try:
            yield from self._white()
            yield from self._call(notation)
            while True:
                self._kept, begun = self._at, self._begun
                if not (yield from self._next(notation)):
                    break
                yield from self._call(notation)
        except NoCallError:
            if self._begun == begun:
                self._at = self._kept or 0
        self._kept = None

    def _next(self, notation: CallNotation) -> Reads:
        """Take what lies between calls without marks; whether a call follows."""
        if notation.kind == "python":
            return False
        for mark in filter(None, (notation.between.strip(), ";", ",")):  # Llama models separate calls by semicolons
            if (yield from self._maybe(mark)):
                return True
        return notation.kind == "json" and (yield from self._starts("{"))

    def _marked(self, notation: CallNotation, mark: str) -> Reads:
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
                        yield from self._require(token, _BETWEEN_IDS if notation.before else "")
                    first = []
                yield from self._call(notation)
                for token in _tokens(notation.end):
                    yield from self._maybe(token)
                if not (yield from self._another(notation)):
                    break
        except NoCallError:
            if self._begun > begun:
                yield from self._skip_call(notation)
            elif self._cut and self._ended:
                self._at = len(self._text)
            else:
                self._say(self._text[self._kept or 0 : self._at])
        self._kept = None

    def _skip_call(self, notation: CallNotation) -> Reads:
        """Leave out what is left of a malformed call whose arguments have begun, up to its last mark."""
        marks = [*_tokens(notation.end)[-1:], *_tokens(notation.after)[-1:]]
        if marks:
            yield from self._until(marks, drop)

    def _another(self, notation: CallNotation) -> Reads:
        """Take what lies between calls under one mark; whether a call follows."""
        after = (_tokens(notation.after) or [""])[0]
        if not notation.before or notation.listed or notation.kind == "python":
            yield from self._maybe(after)
            return False
        if after and (yield from self._maybe(after)):
            return False
        if start := _tokens(notation.start)[:1]:
            with contextlib.suppress(NoCallError):
                self._kept = self._at
                yield from self._require(start[0], _BETWEEN_IDS)
                self._at -= len(start[0])
                return True
            self._at = self._kept or 0
            return False
        yield from self._white()
        return notation.kind == "json" and (yield from self._char()) == "{"

    def _call(self, notation: CallNotation) -> Reads:
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

    def _objects(self, notation: CallNotation) -> Reads:
        """Read {"name": …, "arguments": …}, {NAME: {…}}, or a list of such objects."""
        if (yield from self._take("[{")) == "{":
            return (yield from self._object(notation))
        count = 0
        while True:
            yield from self._white(",")
            if (yield from self._take("{]")) == "]":
                break
            yield from self._object(notation)
            count += 1
        if not count:
            raise NoCallError

    def _object(self, notation: CallNotation, inner: bool = False) -> Reads:
        name, late, called = "", "", False
        while True:
            yield from self._white(",")
            if (yield from self._take('}"')) == "}":
                break
            self._at -= 1
            key = yield from self._read()
            yield from self._take(":")
            if called:  # one call has one object of arguments
                yield from self._whole()
            elif not notation.name:
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
            elif key == "function" and not inner and (yield from self._maybe("{")):
                yield from self._object(notation, inner=True)
                called = True
            else:
                value = yield from self._read()
                name = value if key in (notation.name, "name") and isinstance(value, str) else name
        if not called:
            if not late and (self._unmarked_notation or name not in (self._functions or {})):
                raise NoCallError
            self._name(name)
            self._argue(_normal(late or "{}"))

    @property
    def _unmarked_notation(self) -> bool:
        notation = self._notation
        return notation is not None and notation.kind != "channels" and not (notation.before or notation.start)

    def _named(self, notation: CallNotation) -> Reads:
        name = yield from self._word()
        if notation.numbered:
            name = re.sub(r"^functions\.|:\d+$", "", name)
        for token in _tokens(notation.name_end):
            if not (yield from self._maybe(token)):
                break
        self._name(name)
        yield from self._require("{", _BETWEEN_IDS)
        self._at -= 1
        yield from self._arguments()

    def _tags(self, notation: CallNotation) -> Reads:
        """Read the name, and arguments between tags."""
        key, end = notation.key.strip(), (_tokens(notation.end) or _tokens(notation.after))[0]
        self._name((yield from self._word()))
        yield from self._tag(notation, (key, end))
        before, mark = "{", None
        while (mark := (yield from self._until([key, end], drop))) == key:
            name, text, stated = yield from self._tagged(notation)
            if text is None:
                break
            self._argue(f"{before}{dumped(name)}: {self._typed(text, name, stated)}")
            before = ", "
        self._at -= len(end) if mark == end else 0
        if not self._cut or mark == end:
            self._argue("{}" if before == "{" else "}")

    def _tag(self, notation: CallNotation, marks: tuple[str, str]) -> Reads:
        """Take what follows the name: characters of `name_end`, digits and white space, up to one of `marks`.

        Raises NoCallError for other text.
        """
        while True:
            for mark in marks:
                if (yield from self._starts(mark)):
                    return
            character = yield from self._char()
            if not character and not self._cut:
                return
            if not character or not (character.isspace() or character.isdigit() or character in notation.name_end):
                raise NoCallError
            self._at += 1

    def _tagged(self, notation: CallNotation) -> Reads:
        """Read one argument: its key, its text (None: cut), and what its tags say of its type."""
        key: list[str] = []
        stated: list[str] = []
        value: list[str] = []
        first, *others = _tokens(notation.value[0])
        yield from self._until([first], key.append)
        for token in others:
            yield from self._maybe(token)
        if notation.value[1]:
            yield from self._until([notation.value[1].strip()], stated.append)
        if (yield from self._until([notation.value_end.strip()], value.append)) is None and self._cut:
            return "", None, ""
        text = "".join(value)
        if "".join(notation.value).endswith("\n"):
            text = text.removeprefix("\n")
        if notation.value_end.startswith("\n"):
            text = text.removesuffix("\n")
        if notation.cdata and text.startswith("<![CDATA[") and text.endswith("]]>"):
            text = text[len("<![CDATA[") : -len("]]>")]
        return "".join(key).strip(), text, "".join(stated)

    def _python(self) -> Reads:
        """Read [f(a=1), g()], whose calls are shown once the list is complete."""
        yield from self._white()
        if (yield from self._char()) != "[":
            raise NoCallError
        written_text: list[str] = []
        depth, quote = 0, ""
        while True:
            character = yield from self._char()
            if not character:
                raise NoCallError
            self._at += 1
            written_text.append(character)
            if quote and character == "\\":
                written_text.append((yield from self._char()))
                self._at += 1
            elif character == quote:
                quote = ""
            elif not quote:
                quote = character if character in "'\"" else ""
                depth += (character in "[{(") - (character in ")}]")
                if not depth:
                    break
        calls = python_calls("".join(written_text)[1:-1])
        if calls is None:
            raise NoCallError
        for name, arguments in calls:
            self._name(name)
            shown = (f"{dumped(key)}: {dumped(self._python_value(text, key))}" for key, text in arguments)
            self._argue("{" + ", ".join(shown) + "}")

    def _python_value(self, text: str, key: str) -> Any:
        text = text.strip()
        if text in ("None", "null"):
            return None
        quoted = text[:1] in ("'", '"')
        return typed(str(written(text)) if quoted else text, self._kinds(key), quoted or None)

    def _bare(self, notation: CallNotation) -> Reads:
        """Read NAME{key:value}, JSON without quotes around keys."""
        self._name((yield from self._word()))
        yield from self._white()
        if (yield from self._char()) != "{":
            raise NoCallError
        yield from self._bare_value(notation.quote, "", 1)

    def _bare_value(self, quote: str, key: str, depth: int) -> Reads:
        yield from self._white()
        character = yield from self._char()
        if depth > MAX_DEPTH or not character:
            raise NoCallError
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
                        raise NoCallError
                    inner = "".join(word).replace(quote, "").strip().strip('"')
                    self._argue(f"{dumped(inner)}: ")
                    key = inner if depth == 1 else ""
                yield from self._bare_value(quote, key, depth + 1)
            self._argue(closing)
        elif (yield from self._starts(quote)):
            self._at += len(quote)
            if (yield from self._until([quote], word.append)) is None:
                raise NoCallError
            self._argue(dumped(typed("".join(word), self._kinds(key if depth == 2 else ""), True)))
        elif character == '"':
            yield from self._string(word.append)
            self._argue(dumped(typed(str(loaded("".join(word))), self._kinds(key if depth == 2 else ""), True)))
        else:
            found = yield from self._until([",", "}", "]"], word.append)
            self._at -= bool(found)
            self._argue(self._typed("".join(word).strip(), key if depth == 2 else "", ""))

    def _arguments(self) -> Reads:
        """Read and show arguments: an object, its JSON text as a string, null or an empty text."""
        yield from self._white()
        if (yield from self._char()) == "{":
            yield from self._value(self._argue)
        else:
            self._argue(_normal((yield from self._whole())))

    def _whole(self) -> Reads:
        value: list[str] = []
        yield from self._value(value.append)
        return "".join(value)

    def _read(self) -> Reads:
        return loaded((yield from self._whole()))

    def _name(self, name: str) -> None:
        """Note the call whose arguments follow.

        Raises NoCallError for no name, and without marks for a name of no tool.
        """
        if not name or (self._unmarked_notation and name not in (self._functions or {})):
            raise NoCallError
        self._pending = self._called = name.encode("utf-8", "replace").decode()

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

    def _kinds(self, key: str) -> set[str]:
        """The types that the called function's schema allows for an argument; empty if it does not say."""
        root = (self._functions or {}).get(self._called, {})
        properties = root.get("properties")
        return kinds(properties.get(key), root) if isinstance(properties, Mapping) else set()

    def _typed(self, text: str, key: str, stated: str) -> str:
        """Return an argument between tags as JSON: by its schema, and by what its tags state."""
        if stated and stated.lower() not in ("string", "true"):
            return dumped(written(text))
        return dumped(typed(text, self._kinds(key), True if stated else None))

    def _say(self, text: str) -> None:
        """Show content up to its last white space, which is held back until more follows."""
        kept = text.rstrip()
        if kept:
            self._parts.append(Content(self._space + kept))
            self._space = text[len(kept) :]
        else:
            self._space += text


def _tokens(mark: str) -> list[str]:
    """A mark's parts between white space, of which models vary."""
    return mark.split()


def _normal(text: str) -> str:
    """Arguments as the JSON text of an object. Raises NoCallError for another value."""
    value = loaded(text)
    if isinstance(value, str):  # encoded twice
        value = loaded(value) if value.strip() else {}
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise NoCallError
    return dumped(value)


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
