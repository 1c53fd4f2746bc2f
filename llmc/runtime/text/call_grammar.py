"""Lark grammars that hold a model to tool calls in its own notation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from llmc.errors import InputError
from llmc.runtime.text.call_values import followed, kinds
from llmc.runtime.text.chat_format import CHANNEL, MESSAGE, CallNotation, ChatFormat

_HOW = {"x-guidance": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}", "lenient": True}}
"""White space is bounded, because a weak model may spend all its tokens on it. Keywords that llguidance does not know
are ignored: a tool's schema describes it to the model first of all."""
_OTHER_TYPES = {"array", "boolean", "null", "number", "object"}
_NEXT = "<|start|>assistant"
Constrained: TypeAlias = tuple[str, Any]
"""Kind and value of a constraint as in StructuredOutputsParams: json (a schema as text), json_object, choice, regex."""
_ANY = "/(?s:.*)/"


def call_grammar(
    form: ChatFormat, functions: Sequence[Mapping[str, Any]], several: bool, special: Mapping[str, int],
    thinking: bool = False, answer: Constrained | None = None,
) -> str:  # fmt: skip
    """Build a grammar of calls of `functions` ({"name", "parameters": JSON schema}): one, or if `several` one or more.

    With an `answer`, the text is either calls or that.

    `special` maps the texts of special tokens to their ids. With `thinking`, the prompt has opened a block of
    reasoning, which comes first. Raises InputError for a template whose notation is unknown.
    """
    if form.calls is None:
        raise InputError("this model's chat template has no known notation of tool calls")
    grammar = _Grammar(form.calls, special)
    ways = [grammar.calls(functions, several)]
    if answer is not None:
        ways.append(grammar.answer(form, *answer))
    return grammar.text(form, ways, thinking)


def answer_grammar(form: ChatFormat, answer: Constrained, special: Mapping[str, int], thinking: bool) -> str:
    """Build a grammar of a constrained answer, behind the reasoning of a model that writes it first."""
    grammar = _Grammar(form.calls or CallNotation("json"), special)
    return grammar.text(form, [grammar.answer(form, *answer)], thinking)


class _Grammar:
    def __init__(self, notation: CallNotation, special: Mapping[str, int]) -> None:
        self._notation = notation
        self._special = special
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")
        self._rules: list[str] = []

    def text(self, form: ChatFormat, ways: Sequence[str], thinking: bool) -> str:
        """The grammar of a text of one of several forms, behind reasoning."""
        start = f"({' | '.join(ways)})" if len(ways) > 1 else ways[0]
        if form.in_channels:
            start = f"({self._mark(f'{CHANNEL}analysis{MESSAGE}')} reasoning {self._mark(_NEXT)})? {start}"
            self._rules.append(self.until("reasoning", "<|end|>"))
        elif thinking and form.thinking:
            start = f"reasoning /\\n*/ {start}"
            self._rules.append(self.until("reasoning", form.thinking[1]))
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def calls(self, functions: Sequence[Mapping[str, Any]], several: bool) -> str:
        """What calls consist of."""
        notation = self._notation
        self._rules.append("call: " + " | ".join(self._call(i, function) for i, function in enumerate(functions)))
        listed = notation.listed or notation.kind == "python"
        between = ", " if listed else notation.between
        several = several and (listed or bool(notation.before or notation.start or between.strip()))
        body = f"call ({self._mark(between)} call)*" if several else "call"
        body = f'"[" {body} "]"' if listed else body
        return " ".join(filter(None, (self._mark(notation.before.lstrip()), body, self._mark(notation.after))))

    def answer(self, form: ChatFormat, kind: str, wanted: Any) -> str:
        """What a constrained answer consists of."""
        if kind == "choice":
            rule = " | ".join(map(json.dumps, wanted))
        elif kind == "regex":
            rule = "/" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", wanted, flags=re.DOTALL) + "/"
        else:
            rule = f"%json {wanted}" if kind == "json" else '%json {"type": "object"}'
        self._rules.append(f"answer: {rule}")
        return f"{self._mark(f'{CHANNEL}final{MESSAGE}')} answer" if form.in_channels else "answer"

    def _call(self, index: int, function: Mapping[str, Any]) -> str:
        notation, name = self._notation, str(function["name"])
        schema = {"type": "object", **(function.get("parameters") or {})}
        arguments = f"arguments{index}"
        start, end = notation.start, notation.end
        if notation.kind == "json":
            own = {notation.name: name} if notation.name else {}
            head = (
                f"{{{json.dumps(name)}: " if not own else f"{json.dumps(own)[:-1]}, {json.dumps(notation.arguments)}: "
            )
            self._json(arguments, schema)
            words = [head] if start or notation.before else re.findall(r'"[^"]*"|[^"]+', head)  # answers begin so too
            rule = f"{self._mark(start)} {' '.join(map(json.dumps, words))} {arguments} {self._mark('}' + end)}"
        elif notation.kind == "named":
            self._json(arguments, schema)
            written = json.dumps(f"functions.{name}:" if notation.numbered else name)
            number = r"/\d+/" if notation.numbered else ""
            given_id = f"/[a-zA-Z0-9]{{9}}/ {self._mark(notation.id_end)}" if notation.id_end else ""
            head = f"{self._mark(start)} {written} {number} {self._mark(notation.name_end)} {given_id}"
            rule = f"{head} {arguments} {self._mark(end)}"
        elif notation.kind == "channels":
            self._json(arguments, schema)
            head = f"{json.dumps(f' to=functions.{name}')} {self._mark(f'{CHANNEL}commentary ')}"
            rule = f"{head} ({self._mark('<|constrain|>')})? {self._mark(f'json{MESSAGE}')} {arguments}"
        else:
            rule = self._properties(index, name, schema)
        self._rules.append(f"call{index}: {rule}")
        return f"call{index}"

    def _properties(self, index: int, name: str, schema: Mapping[str, Any]) -> str:
        """Arguments one after another, in the order of the schema; those that are not required may be left out."""
        notation = self._notation
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required") or ()
        rules = []
        for number, (key, given) in enumerate(properties.items()):
            rule = f"property{index}x{number}"
            ways = self._ways(f"value{index}x{number}", _standing_alone(given, schema))
            if notation.kind == "python":
                if not re.fullmatch(r"\w+", key):
                    raise InputError(f"the argument {key[:80]!r} of {name[:80]!r} cannot be written in a Python call")
                head = json.dumps(f"{key}=")
            elif notation.kind == "tags":
                head = f"{self._mark(notation.key)} {json.dumps(key)} {self._mark(notation.value[0])}"
            else:
                head = json.dumps(f"{key}:")
            self._rules.append(f"{rule}: {head} ({' | '.join(ways)})")
            rules.append((rule, key in required))
        start, end = notation.start, notation.end
        if notation.kind == "tags":
            chosen = " ".join(rule if needed else f"({rule})?" for rule, needed in rules)
            return f"{self._mark(start)} {json.dumps(name)} {self._mark(notation.name_end)} {chosen} {self._mark(end)}"
        opening, closing, comma = ("(", ")", '", "') if notation.kind == "python" else ("{", "}", '","')
        needed = [rule for rule, is_needed in rules if is_needed]
        others = [f"({comma} {rule})?" for rule, is_needed in rules if not is_needed]
        first = f" {comma} ".join(needed)
        if not needed and rules:  # one of several first arguments, and then any that follow it
            ways = [
                " ".join([rule, *(f"({comma} {later})?" for later, _ in rules[n + 1 :])])
                for n, (rule, _) in enumerate(rules)
            ]
            first, others = f"({' | '.join(ways)})?", []
        body = " ".join([first, *others]) if rules else ""
        head = self._mark(start) if notation.kind == "bare" else ""
        return f"{head} {json.dumps(name + opening)} {body} {self._mark(closing + end)}"

    def _ways(self, rule: str, schema: Mapping[str, Any]) -> list[str]:
        """The ways to write a value: as text without JSON's quotes, and as JSON."""
        notation = self._notation
        types = kinds(schema, schema)
        ways = []
        words = notation.words if any(notation.words) else ("true", "false")
        others = json.dumps(words[1])
        if words[1] != "false":  # the word names the type
            named = {"number" if kind == "integer" else kind for kind in types - {"string"} or _OTHER_TYPES}
            others = f"({' | '.join(map(json.dumps, sorted(named)))})"
        if notation.kind in ("tags", "bare") and (not types or "string" in types):
            stated = followed(schema, schema)
            choices = [stated["const"]] if "const" in stated else stated.get("enum")
            end = notation.value_end or notation.quote
            if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
                self._rules.append(f"{rule}: {' | '.join(map(json.dumps, choices))}")
                value = f"{rule} {self._mark(end)}"
            else:
                self._rules.append(self.until(rule, end))
                value = rule
            word = f"{json.dumps(words[0])} {self._mark(notation.value[1])}" if notation.value[1] else ""
            ways.append(f"{word} {self._mark(notation.quote)} {value}")
            if types == {"string"} or (notation.kind == "tags" and not word):  # a text may be any value
                return ways
        self._json(f"{rule}json", schema)
        word = f"{others} {self._mark(notation.value[1])}" if notation.value[1] else ""
        return [*ways, f"{word} {rule}json {self._mark(notation.value_end)}"]

    def _json(self, rule: str, schema: Mapping[str, Any]) -> None:
        self._rules.append(f"{rule}: %json {json.dumps({**_local(schema), **_HOW})}")

    def until(self, rule: str, mark: str) -> str:
        """A rule for any text up to and including a mark."""
        if self._split.search(mark) and self._special:
            return f"{rule}: {_ANY} {self._mark(mark)}"
        return f"{rule}[suffix={json.dumps(mark)}]: {_ANY}"

    def _mark(self, mark: str) -> str:
        """A mark as literals and special tokens."""
        pieces = self._split.split(mark) if self._special else [mark]
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece) for piece in pieces if piece
        )


def _standing_alone(given: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an argument, with what its references to `root` need."""
    one = dict(given) if isinstance(given, Mapping) else {}
    if '"$ref": "#' not in json.dumps(one):
        return one
    moved = re.sub(r'"\$ref": "#', '"$ref": "#/$defs/root', json.dumps({**one, "$defs": {"root": root}}))
    whole: dict[str, Any] = json.loads(moved)
    return whole


def _local(schema: Any) -> Any:
    """A schema without references to other documents, which stand for any value."""
    if isinstance(schema, Mapping):
        kept = {key: _local(value) for key, value in schema.items()}
        reference = kept.get("$ref")
        return {} if isinstance(reference, str) and not reference.startswith("#") else kept
    return [_local(item) for item in schema] if isinstance(schema, list) else schema
