"""What a chat template takes and what its model writes, found by rendering short conversations.

Published templates differ in how they take content and the arguments of earlier calls, in which roles they show, and in
the notation in which they write calls. A model was trained on the text that its template writes, so the notation of an
earlier call in the prompt is the notation of the model's own calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from llmc.errors import InputError

Messages: TypeAlias = list[dict[str, Any]]
Kind: TypeAlias = Literal["json", "named", "tags", "python", "bare", "channels"]
Render: TypeAlias = Callable[[Messages, Sequence[Mapping[str, Any]] | None, bool], str]
"""Renders messages, tools and whether to begin an answer; raises InputError."""

CHAT_FORMAT = "chat_format.json"
"""A bundle's file with the format of its chat template."""
THINKING = (
    ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<mm:think>", "</mm:think>"),
    ("<think:opensource>", "</think:opensource>"), ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"), ("<|open|>think<|sep|>", "<|close|>think<|sep|>"), ("<|think|>", "<|end|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)  # fmt: skip
"""Marks around a model's reasoning, as published templates write them."""
DESCRIBED: Mapping[Kind, str] = {
    "json": "JSON objects", "named": "a name and JSON", "tags": "a tag for each argument", "python": "Python calls",
    "bare": "JSON without quotes", "channels": "messages in channels",
}  # fmt: skip
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
"""gpt-oss marks reasoning, calls and answers by channels (OpenAI's Harmony format)."""

HARMONY_TOKENS = (CHANNEL, MESSAGE, "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")

MAX_MARK = 512
"""Characters of one mark."""
MAX_TURN = 20_000
"""Characters of a rendered turn in which a notation is looked for."""

_NAMES, _IDS = ("weatherq7", "stocksq7"), ("functions.weatherq7:0", "functions.stocksq7:1")
_SHORT_IDS = ("callq7id0", "callq7id1")
_LONG_IDS = ("call_q7id0", "call_q7id1")
"""Kimi K2 wants ids of the first form, and Mistral nine letters or digits."""
_ALL_IDS = (_SHORT_IDS, _IDS)
_TEXT, _NUMBER = ("cityq7", "Romaq7"), ("countq7", 7341)
_ARGUMENTS = dict((_TEXT, _NUMBER))
_USER = {"role": "user", "content": "Userq7"}
_ANSWER = "Answerq7"
_ROLES = ("system", "developer", "tool")


@dataclass(frozen=True)
class CallNotation:
    """How a model writes tool calls.

    before, after   text around all calls of an answer
    start, end      text around each call
    between         text between calls
    kind            json: an object with the name and the arguments, or a list of them (`listed`). named: the name, then
                    `name_end` and the arguments as JSON. tags: the name, then each argument between tags. python:
                    [f(a=1)]. bare: JSON without quotes around keys, `quote` around texts. channels: see CHANNEL
    numbered        named: the name is written as functions.NAME:0, with the number of the call
    name, arguments keys of a json object; an empty `name` means {NAME: ARGUMENTS}
    key, value      tags: text before a key, text from a key to its value, split where it varies by type, and text after
    encoded         json: the arguments are a JSON text
    cdata           tags: texts may be written in <![CDATA[ ]]>
    words           tags: what stands between the two parts of `value` for a text and for a number
    id_end          named: text after an id, which stands between `name_end` and the arguments
    """

    kind: Kind
    before: str = ""
    start: str = ""
    end: str = ""
    after: str = ""
    between: str = ""
    name: str = "name"
    arguments: str = "arguments"
    listed: bool = False
    encoded: bool = False
    numbered: bool = False
    name_end: str = ""
    key: str = ""
    value: tuple[str, str] = ("", "")
    value_end: str = ""
    quote: str = ""
    cdata: bool = False
    words: tuple[str, str] = ("", "")
    id_end: str = ""

    def __post_init__(self) -> None:
        texts = (*self.marks, *self.words, self.name, self.arguments)
        switches = (self.listed, self.encoded, self.numbered, self.cdata)
        right = self.kind in DESCRIBED and len(self.value) == len(self.words) == 2
        right = right and all(isinstance(text, str) and len(text) <= MAX_MARK for text in texts)
        if not right or not all(isinstance(switch, bool) for switch in switches):
            raise InputError(f"not a notation of tool calls: {self!r:.200}")
        needed: tuple[str, ...] = ()
        if self.kind == "tags":  # without them, reading would not move on
            needed = (self.key, self.value[0], self.value_end, self.end or self.after)
        elif self.kind == "bare":
            needed = (self.quote,)
        if not all(mark.strip() for mark in needed):
            raise InputError(f"a notation of tool calls lacks marks: {self!r:.200}")

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts of the notation."""
        return (
            self.before, self.start, self.end, self.after, self.between, self.name_end, self.id_end, self.key,
            *self.value, self.value_end, self.quote,
        )  # fmt: skip


@dataclass(frozen=True)
class ChatFormat:
    """What a template takes: content as a list of parts, arguments of calls as JSON text, and the roles that it shows.

    `thinking` are the marks around reasoning, and `calls` is the notation of tool calls, or None.
    """

    parts: bool = False
    argument_text: bool = False
    roles: tuple[str, ...] = _ROLES
    thinking: tuple[str, str] | None = None
    calls: CallNotation | None = None
    shows_calls: bool = True
    """Whether the template shows earlier calls."""
    several: bool = True
    """Whether it takes several calls of one message."""
    short_ids: bool = False
    """Whether it takes only ids of nine letters and digits."""
    middle_system: bool = True
    """Whether it shows a system message behind others."""
    calls_apart: bool = False
    """Whether it shows content and calls only in messages of their own."""

    def __str__(self) -> str:
        """What the model writes, in one line."""
        calls, thinking = self.calls, self.thinking
        if self.in_channels:
            return "reasoning, answers and tool calls in channels (Harmony)"
        said = [] if thinking is None else [f"reasoning between {thinking[0]} and {thinking[1]}"]
        if calls is not None:
            first, last = " ".join((calls.before + calls.start).split()), " ".join((calls.end + calls.after).split())
            said.append(f"tool calls as {DESCRIBED[calls.kind]}" + (f": {first} … {last}" if first else ""))
        return "; ".join(said) or "text alone"

    @property
    def in_channels(self) -> bool:
        """Whether the model writes messages with channels, and never plain text."""
        return self.calls is not None and self.calls.kind == "channels"

    def begins_thinking(self, prompt: str) -> bool:
        """Whether a rendered prompt has opened a block of reasoning."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking[0])

    def marks(self, text: str) -> bool:
        """Whether a special token, such as <tool_call>, is part of the model's notation."""
        if self.in_channels and text in HARMONY_TOKENS:
            return True
        notation = () if self.calls is None else self.calls.marks
        return any(text in mark for mark in (*notation, *(self.thinking or ())))

    def to_dict(self) -> dict[str, Any]:
        """Return the format as JSON data."""
        return asdict(self)

    @classmethod
    def read(cls, text: str | bytes) -> ChatFormat:
        """Read the JSON text of `to_dict`. Raises InputError for another text."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"not a chat format: {error}") from None
        if not isinstance(data, dict):
            raise InputError("not a chat format: not a JSON object")
        return cls.of(data)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> ChatFormat:
        """Read what `to_dict` returned. Raises InputError for other data."""
        try:
            calls = data.get("calls")
            if calls is not None:
                pairs = {name: tuple(calls.get(name, ("", ""))) for name in ("value", "words")}
                calls = CallNotation(**{**calls, **pairs})
            thinking = None if data.get("thinking") is None else tuple(data["thinking"])
            found = cls(**{**data, "roles": tuple(data.get("roles", _ROLES)), "thinking": thinking, "calls": calls})
        except (TypeError, AttributeError) as error:
            raise InputError(f"not a chat format: {error}") from None
        for name, values, kind in (
            ("thinking", found.thinking or (), str), ("roles", found.roles, str),
            ("switches", [getattr(found, field.name) for field in fields(cls) if field.type == "bool"], bool),
        ):  # fmt: skip
            if not all(isinstance(value, kind) for value in values):
                raise InputError(f"not a chat format: {name} are {values!r:.80}")
        if thinking is not None and (len(thinking) != 2 or not all(mark.strip() for mark in thinking)):
            raise InputError(f"not a chat format: thinking {data['thinking']!r:.80} is no pair of marks")
        return found


def find_format(source: str, render: Render) -> ChatFormat:
    """Find the format of a template with the text `source`.

    One that does not show what a user says has the default format.
    """
    parts = _takes_parts(render)
    shown = _Shown(render, parts)
    if not shown.says("user"):
        return ChatFormat()
    argument_text = shown.as_text()
    calls = shown.notation(argument_text)
    if all(mark in source for mark in (CHANNEL, MESSAGE, f"{CHANNEL}analysis")):
        calls = CallNotation("channels")
    elif calls is not None and calls.kind == "tags":
        calls = replace(calls, cdata="<![CDATA[" in source)
    seen = source + shown.reasoning()
    pairs = (pair for pair in THINKING if pair[1] in seen and ("/think" in pair[1] or pair[0] in seen))
    return ChatFormat(
        parts=parts,
        argument_text=argument_text,
        roles=tuple(role for role in _ROLES if shown.says(role, argument_text)),
        thinking=next(pairs, None),
        calls=calls or _stated(source),
        shows_calls=shown.shows(argument_text, 1),
        several=shown.shows(argument_text, 2),
        short_ids=shown.shows(argument_text, 1, [_SHORT_IDS]) and not shown.shows(argument_text, 1, [_LONG_IDS]),
        middle_system=shown.says_later("system"),
        calls_apart=shown.calls_apart(argument_text),
    )


def _takes_parts(render: Render) -> bool:
    """Whether the template shows content only as a list of parts."""
    typed = [{"role": "user", "content": [{"type": "text", "text": "Userq7"}]}]
    return "Userq7" not in _try(render, [_USER]) and "Userq7" in _try(render, typed)


def _stated(source: str) -> CallNotation | None:
    """The notation of a template that describes it to its model, but writes no earlier call itself."""
    for mark, notation in (
        ("<tool_call>", CallNotation("json", start="<tool_call>\n", end="\n</tool_call>")),
        ("<|tool_call_start|>", CallNotation("python", before="<|tool_call_start|>", after="<|tool_call_end|>")),
        ("<|tool_call|>", CallNotation("json", before="<|tool_call|>", listed=True)),
    ):
        if mark in source:
            return notation
    return None


def _try(
    render: Render, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, begin: bool = False
) -> str:
    try:
        return render(messages, tools, begin)
    except InputError:
        return ""


class _Shown:
    """What the template writes for calls of two tools."""

    def __init__(self, render: Render, parts: bool) -> None:
        self._render = render
        self._parts = parts
        schema = {
            "type": "object",
            "properties": {
                _TEXT[0]: {"type": "string", "description": "A city."},
                _NUMBER[0]: {"type": "integer", "description": "A number."},
            },
            "required": [_TEXT[0]],
        }
        self._tools = [
            {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}
            for name in _NAMES
        ]

    def as_text(self) -> bool:
        """Whether arguments of earlier calls have to be JSON text: as an object they are refused or shown as Python."""
        shown = self._turn(1, as_text=False)
        return (not shown or f"'{_TEXT[0]}': '{_TEXT[1]}'" in shown) and bool(self._turn(1, as_text=True))

    def shows(self, as_text: bool, count: int, ids: Sequence[Sequence[str]] = _ALL_IDS) -> bool:
        """Whether the template shows `count` calls of one message."""
        return _NAMES[count - 1] in self._turn(count, as_text, ids)

    def calls_apart(self, as_text: bool) -> bool:
        """Whether the template shows content and calls only in messages of their own."""
        for ids in _ALL_IDS:
            said = {"role": "assistant", "content": self._content("Saidq7")}
            calls = {"role": "assistant", "content": self._content(""), "tool_calls": self._calls(1, as_text, ids)}
            one, two = (
                _try(self._render, [self._user, *messages], self._tools)
                for messages in ([{**calls, **said}], [said, calls])
            )
            if "Saidq7" in one and _NAMES[0] in one[one.find("Userq7") :]:
                return False
            if "Saidq7" in two and _NAMES[0] in two[two.find("Userq7") :]:
                return True
        return False

    def says(self, role: str, as_text: bool = False) -> bool:
        """Whether the template shows what a message of this role says."""
        said = {"role": role, "content": self._content("Saidq7")}
        if role == "tool":
            calls = {
                "role": "assistant",
                "content": self._content(""),
                "tool_calls": self._calls(1, as_text, _SHORT_IDS),
            }
            named = {**said, "tool_call_id": _SHORT_IDS[0], "name": _NAMES[0]}
            return "Saidq7" in _try(self._render, [self._user, calls, named], self._tools)
        messages = [said] if role == "user" else [said, self._user]
        return any("Saidq7" in _try(self._render, messages, tools, True) for tools in (None, self._tools))

    def says_later(self, role: str) -> bool:
        """Whether the template shows what a message of this role says behind others."""
        said = {"role": role, "content": self._content("Saidq7")}
        answer = {"role": "assistant", "content": self._content(_ANSWER)}
        messages = [self._user, answer, said, self._user]
        return "Saidq7" in _try(self._render, messages, None, True)

    def reasoning(self) -> str:
        """What the template writes for an answer with reasoning, which may join marks from pieces."""
        said = {"role": "assistant", "content": self._content(_ANSWER)}
        given = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "Reasonq7")
        return _try(self._render, [self._user, {**said, **given}])

    def notation(self, as_text: bool) -> CallNotation | None:
        """The notation of calls, or None where the template shows none or an unknown one."""
        one, two = self._turn(1, as_text), self._turn(2, as_text)
        for find in (_json_calls, _named_calls, _bare_calls, _tag_calls, _python_calls):
            if one and (found := find(one, two)):
                return found
        return None

    @property
    def _user(self) -> dict[str, Any]:
        return {**_USER, "content": self._content("Userq7")}

    @cached_property
    def _plain(self) -> str:
        """A conversation with an answer of text, up to its end."""
        said = {"role": "assistant", "content": self._content(_ANSWER)}
        return _try(self._render, [self._user, said], self._tools)[-MAX_TURN:]

    @cached_property
    def _prompt(self) -> str:
        """The prompt for an answer."""
        return _try(self._render, [self._user], self._tools, begin=True)[-MAX_TURN:]

    def _content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self._parts else text

    def _calls(self, count: int, as_text: bool, ids: Sequence[str]) -> list[dict[str, Any]]:
        given: Any = json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS
        return [
            {"id": ids[i], "type": "function", "function": {"name": _NAMES[i], "arguments": given}}
            for i in range(count)
        ]

    def _turn(self, count: int, as_text: bool, all_ids: Sequence[Sequence[str]] = _ALL_IDS) -> str:
        """What the template writes for an answer of `count` calls, without what it writes around any answer."""
        for ids in all_ids:
            listed = self._calls(count, as_text, ids)
            calls = {"role": "assistant", "content": self._content(""), "tool_calls": listed}
            shown = _try(self._render, [self._user, calls], self._tools)[-MAX_TURN:]
            if _NAMES[0] in shown[shown.rfind("Userq7") :]:
                begin, _, end = self._plain.partition(_ANSWER)
                header = max(len(_common_prefix(begin, shown)), len(_common_prefix(self._prompt, shown)))
                start = max(header, shown.rfind("Userq7") + len("Userq7"))
                if not shown[start:].strip():
                    return ""
                return shown[start : len(shown) - len(_common_suffix(end, shown[start:]))]
        return ""


def _shared(a: str, b: str) -> str:
    """The longest common prefix."""
    return a[: next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _common_prefix(a: str, b: str) -> str:
    """The common prefix, without a tag that it cuts: "<" or "[" whose end is not in it."""
    shared = _shared(a, b)
    return shared if shared in (a, b) else re.sub(r"(<[^>]*|\[[^\]]*)$", "", shared)


def _common_suffix(a: str, b: str) -> str:
    """The common suffix, without a tag that it cuts."""
    shared = _shared(a[::-1], b[::-1])[::-1]
    return shared if shared in (a, b) else re.sub(r"^([^<]*>|[^\[]*\])", "", shared)


def _around(one: str, first: tuple[int, int], two: str, bodies: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The texts before, between and after calls; `first` and `bodies` are where calls lie in `one` and `two`."""
    before, after = one[: first[0]].rpartition(_NAMES[0])[2], one[first[1] :]
    start = end = between = ""
    if len(bodies) > 1:
        middle = two[bodies[0][1] : bodies[1][0]].rpartition(_NAMES[1])[2]
        start = _common_suffix(before, middle)
        start = start if start.strip() else ""
        end = _common_prefix(middle[: len(middle) - len(start)], after)
        before, after = before[: len(before) - len(start)], after[len(end) :]
        between = middle[len(end) : len(middle) - len(start)]
    for word in (*_IDS, *_SHORT_IDS):  # an id of the call belongs to no mark
        before, between = before.partition(word)[0], between.partition(word)[0]
    end = re.sub(rf"^.*({_TEXT[0]}|{_NUMBER[0]})>?", "", end, flags=re.DOTALL)
    for _, close in THINKING:
        before = before.rpartition(close)[2]
    tags = re.findall(r"[^>\]]*[>\]]", after) or [after]  # after the first own tag the next turn may begin
    own = next((n for n, tag in enumerate(tags, 1) if tag.strip() not in start + end), 1)
    before, after = before if before.strip() else "", "".join(tags[:own])
    return {
        "before": before, "start": start if before else start.lstrip(), "end": end, "between": between,
        "after": after if after.strip() else "",
    }  # fmt: skip


def _values(text: str) -> Iterator[tuple[int, int, Any]]:
    """JSON objects and lists in a text, outermost first: where they begin and end, and their values."""
    decoder, index = json.JSONDecoder(), 0
    while match := re.compile(r"[{\[]").search(text, index):
        try:
            value, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            index = match.start() + 1
            continue
        yield match.start(), end, value
        index = end


def _call_keys(value: Any) -> dict[str, Any] | None:
    """The keys of a JSON call."""
    if not isinstance(value, dict):
        return None
    if value.get(_NAMES[0]) == _ARGUMENTS:
        return {"name": ""}
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = next((key for key, item in value.items() if item == _NAMES[0]), None)
    encoded = json.dumps(_ARGUMENTS)
    given = next((key for key, item in value.items() if item in (_ARGUMENTS, encoded)), None)
    if name is None or given is None:
        return None
    return {"name": name, "arguments": given, "encoded": value[given] == encoded}


def _json_calls(one: str, two: str) -> CallNotation | None:
    for begin, end, value in _values(one):
        listed = isinstance(value, list)
        keys = _call_keys(value[0] if listed and len(value) == 1 else value)
        if keys is not None:
            bodies = [] if listed else [(start, stop) for start, stop, item in _values(two) if isinstance(item, dict)]
            return CallNotation("json", listed=listed, **keys, **_around(one, (begin, end), two, bodies))
    return None


def _named_calls(one: str, two: str) -> CallNotation | None:
    found = next(((begin, end) for begin, end, value in _values(one) if value == _ARGUMENTS), None)
    name = one.rfind(_NAMES[0], 0, found[0]) if found else -1
    if found is None or name < 0:
        return None
    given = [(begin, end) for begin, end, value in _values(two) if value == _ARGUMENTS]
    bodies = [(two.rfind(name, 0, begin), end) for name, (begin, end) in zip(_NAMES, given, strict=False)]
    around = _around(one, (name, found[1]), two, bodies)
    name_end, _, id_end = one[name + len(_NAMES[0]) : found[0]].partition(_SHORT_IDS[0])
    numbered = name_end.startswith(":0")
    start = around["start"].removesuffix("functions.") if numbered else around["start"]
    return CallNotation(
        "named", name_end=name_end.removeprefix(":0"), id_end=id_end, numbered=numbered, **{**around, "start": start}
    )  # fmt: skip


def _bare_calls(one: str, two: str) -> CallNotation | None:
    shape = (
        r"{name}\{{" + re.escape(_TEXT[0]) + r":(?P<quote>\W\S{{0,12}}?){text}(?P=quote),{number}:\S*?{count}\S*?\}}"
    )
    patterns = [
        re.compile(shape.format(name=name, text=_TEXT[1], number=_NUMBER[0], count=_NUMBER[1])) for name in _NAMES
    ]
    found = patterns[0].search(one)
    if found is None:
        return None
    bodies = [match.span() for pattern in patterns if (match := pattern.search(two))]
    return CallNotation("bare", quote=found["quote"], **_around(one, found.span(), two, bodies))


def _tag_calls(one: str, two: str) -> CallNotation | None:
    words = (*_TEXT, _NUMBER[0], str(_NUMBER[1]))
    at = [one.find(words[0])]
    for word in words[1:]:
        at.append(one.find(word, at[-1]))
    name = one.rfind(_NAMES[0], 0, max(at[0], 0))
    if name < 0 or -1 in at:
        return None
    texts = [one[start + len(word) : stop] for start, word, stop in zip(at, words, at[1:], strict=False)]
    first, rest = one[name + len(_NAMES[0]) : at[0]], one[at[3] + len(words[3]) :]
    value_end = _common_prefix(texts[1], rest)
    key = _common_suffix(first, texts[1][len(value_end) :])
    if not (key.strip() and value_end.strip() and texts[0].strip()):
        return None
    value, stated = (texts[0], ""), ("", "")
    if texts[0] != texts[2]:  # a mark between key and value names the type
        shared = _shared(texts[0], texts[2])
        value = (shared, _shared(texts[0][::-1], texts[2][::-1])[::-1])
        value = (shared, re.sub(r"^[^\"'>]*", "", value[1]))
        stated = (texts[0][len(shared) : -len(value[1]) or None], texts[2][len(shared) : -len(value[1]) or None])
    last = f"{words[3]}{value_end}"
    bodies = [(start, two.find(last, start) + len(last)) for start in (two.rfind(name) for name in _NAMES)]
    around = _around(one, (name, at[3] + len(last)), two, bodies if two else [])
    if not (around["end"] or around["after"]).strip():
        return None
    name_end = first[: len(first) - len(key)]
    return CallNotation(
        "tags", name_end=name_end, key=key, value=value, value_end=value_end, words=stated, **around
    )  # fmt: skip


def _python_calls(one: str, two: str) -> CallNotation | None:
    found = re.search(
        rf"\[{_NAMES[0]}\({_TEXT[0]}=['\"]?{_TEXT[1]}['\"]?,? ?{_NUMBER[0]}=['\"]?{_NUMBER[1]}['\"]?\)\]", one
    )
    return None if found is None else CallNotation("python", **_around(one, found.span(), two, []))
