"""Conversion of chat messages to prompt text, through the model's jinja2 template in a sandbox.

Templates come with checkpoints and are not trusted. They run in jinja2's immutable sandbox, see plain data only, and
have limited output. Time and memory are limited by the child processes that render templates on systems with fork
(confined_chat.py). Settings and helper names (raise_exception, tojson, strftime_now, loop controls, the generation tag)
are those of transformers, so a template renders the same text in both.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from llmc.errors import InputError
from llmc.runtime.text.call_values import loaded
from llmc.runtime.text.chat_format import ChatFormat, find_format

if TYPE_CHECKING:
    from jinja2 import Template

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
MAX_PROMPT_CHARACTERS = 16 << 20
MAX_DATA_DEPTH = 64
_SCALARS: dict[type, Any] = {str: str.__str__, int: int.__int__, float: float.__float__}
_MAY_BE_EMPTY = ("assistant", "tool", "function", "ipython")
"""Roles whose content may be null: calls and results may come without text."""
_INSTRUCTING = {"system", "developer"}
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


class ChatTemplate:
    """A compiled template. `special_tokens` (bos_token, eos_token, …) are template variables.

    The constructor compiles it, in about 10 ms including the import of jinja2. Thread-safe. Raises InputError for a
    template that does not parse, and for None (a model without one). `form` is what the template takes, found by
    rendering short conversations unless given.
    """

    def __init__(
        self, source: str | None, special_tokens: Mapping[str, str] | None = None, form: ChatFormat | None = None
    ) -> None:
        self.source = self._known(source)
        self._special_tokens = dict(special_tokens or {})
        self._template = _compile(self.source)
        self._form = form

    @property
    def form(self) -> ChatFormat:
        """What the template takes, and what its model writes."""
        if self._form is None:
            self._form = self._find()
        return self._form

    @form.setter
    def form(self, form: ChatFormat) -> None:
        self._form = form

    def _find(self) -> ChatFormat:
        def render(messages: Any, tools: Any, begin: bool) -> str:
            given = {"messages": messages, "tools": tools, "add_generation_prompt": begin, "documents": None}
            return self._run(self._special_tokens | given)

        return find_format(self.source, render)

    @staticmethod
    def _known(source: str | None) -> str:
        if source is None:
            raise InputError("this model has no chat template: send a plain prompt (/v1/completions, `--prompt`)")
        return source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt. Encode it with add_special_tokens=False, because it contains the special tokens.

        A message is {"role", "content", …} with a role from ROLES. content is text, a list of {"type": "text", "text":
        …} parts, which are joined by newlines, or None, but not from a user or the system. The messages are changed to
        what the template takes (`adapted`). `variables` are further template variables (enable_thinking, documents, …).
        Raises InputError for other messages and for any template error.
        """
        variables = variables or {}
        clash = sorted(_RESERVED.intersection(variables))
        if clash:
            raise InputError(f"chat template variable {clash[0]!r} is set by the request itself")
        context = self._special_tokens | {str(name): plain_data(value) for name, value in variables.items()}
        context.setdefault("documents", None)
        return self._run(
            context
            | {
                "messages": adapted(check_messages(messages), self.form),
                "tools": None if tools is None else _tools(tools),
                "add_generation_prompt": add_generation_prompt,
            }
        )

    async def rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render from a coroutine; this implementation blocks the event loop."""
        return self.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )  # fmt: skip

    def check(self) -> None:
        """Raise InputError for a template that does not parse, if the constructor has not."""

    def close(self) -> None:
        """Release the renderer's resources."""

    def _run(self, context: dict[str, Any]) -> str:
        pieces, size = [], 0
        try:
            for piece in self._template.generate(context):
                size += len(piece)
                if size > MAX_PROMPT_CHARACTERS:
                    raise InputError(f"the chat template renders more than {MAX_PROMPT_CHARACTERS} characters")
                pieces.append(piece)
        except InputError:
            raise
        except MemoryError:
            raise InputError("the chat template takes more memory for these messages than there is") from None
        except Exception as error:  # a template is a program: anything may go wrong in it
            raise InputError(f"the chat template refuses these messages: {error or type(error).__name__}") from error
        return "".join(pieces)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as plain data with text content. Raises InputError (`ChatTemplate.render` states the form)."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InputError('messages must be a list of at least one {"role": …, "content": …}')
    return [_message(index, message) for index, message in enumerate(messages)]


def _tools(tools: Any) -> list[Any]:
    listed = isinstance(tools, Sequence) and not isinstance(tools, str)
    if not listed or not all(isinstance(tool, Mapping) for tool in tools):
        raise InputError(f"tools must be a list of objects, not {tools!r:.80}")
    return [plain_data(tool) for tool in tools]


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"messages[{index}] is {type(message).__name__}, not an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise InputError(f"messages[{index}].role is {role!r:.80}; known: {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and role not in _MAY_BE_EMPTY:
        raise InputError(f"messages[{index}] ({role}) has no content")
    checked: dict[str, Any] = {key: value for key, value in plain_data(message).items() if value is not None}
    if not checked.get("tool_calls"):
        checked.pop("tool_calls", None)
    checked["content"] = "" if content is None else _text(content, f"messages[{index}].content")
    return checked


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return str(content)
    if not isinstance(content, Sequence):
        raise InputError(f"{where} is {type(content).__name__}, not text")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get(kind) if isinstance(part, Mapping) and kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise InputError(f"{where} has a part of type {kind!r:.80}; this model takes text parts only")
        parts.append(text)
    return "\n".join(parts)


def adapted(messages: Sequence[dict[str, Any]], form: ChatFormat) -> list[dict[str, Any]]:
    """Change checked messages to what a template takes, so that it shows all that they say.

    Earlier calls have their arguments as objects, or as JSON text if the template needs that, and ids of its own form.
    Results are in the order of their calls. A developer is the system where the template knows none. The system's text
    begins the next user message where the template knows no system, or none behind other messages. Calls and their
    results are JSON text of the assistant and the user where the template shows neither.
    """
    found: list[dict[str, Any]] = []
    system, changed, begun = "", False, False
    for message in _ordered(_identified(list(map(_renewed, messages)), form)):
        one, was_changed, changed = dict(message), changed, False
        if one["role"] == "developer" and "developer" not in form.roles:
            one["role"], changed = "system", True
        if one["role"] == "system" and ("system" not in form.roles or (begun and not form.middle_system)):
            system = f"{system}{one['content']}\n\n"
            continue
        begun = begun or one["role"] not in _INSTRUCTING
        if one["role"] == "tool" and "tool" not in form.roles:
            said = {key: one[key] for key in ("tool_call_id", "name", "content") if key in one}
            one = {"role": "user", "content": json.dumps({"tool_response": said}, ensure_ascii=False)}
            changed = True
        if one["role"] == "user" and system:
            one["content"], system = f"{system}{one['content']}", ""
        several = _with_calls(one, form)
        last: dict[str, Any] = found[-1] if found else {"role": None}
        instructs = {one["role"], last["role"]} <= _INSTRUCTING  # many templates show only one such message
        if instructs or (last["role"] == one["role"] and (changed or was_changed)):  # and some want roles to alternate
            last["content"] = f"{last['content']}\n\n{one['content']}"
        else:
            found += several
    if system and not begun:
        raise InputError("messages: this model's chat template shows no system message; add a user message after it")
    if system:
        found.append({"role": "user", "content": system.removesuffix("\n\n")})
    if form.parts:
        for one in found:
            one["content"] = [{"type": "text", "text": one["content"]}]
    return found


def _renewed(message: dict[str, Any]) -> dict[str, Any]:
    """A message with a function_call or a function's result, of OpenAI's first API, as one of tools."""
    if message["role"] == "function":
        return {**message, "role": "tool"}
    if "function_call" not in message or "tool_calls" in message:
        return message
    rest = {key: value for key, value in message.items() if key != "function_call"}
    return {**rest, "tool_calls": [{"type": "function", "function": message["function_call"]}]}


def _identified(messages: Sequence[dict[str, Any]], form: ChatFormat) -> list[dict[str, Any]]:
    """Messages whose calls and results have ids as the template takes them."""
    found = []
    ids: dict[str, str] = {}
    count, last = 0, ""
    for message in messages:
        one = dict(message)
        calls = [dict(call) if isinstance(call, dict) else call for call in one.get("tool_calls", ())]
        for call in calls:
            if isinstance(call, dict):
                given = str(call.get("id") or f"call{count}")
                call["id"] = last = ids[given] = _id(given, call, count, form)
                count += 1
        if calls:
            one["tool_calls"] = calls
        if one["role"] == "tool":
            given = str(one.get("tool_call_id") or "")
            one["tool_call_id"] = ids.get(given, given) or last
        found.append(one)
    return found


def _id(given: str, call: Mapping[str, Any], count: int, form: ChatFormat) -> str:
    if form.calls is not None and form.calls.numbered and isinstance(call.get("function"), Mapping):
        return f"functions.{call['function'].get('name')}:{count}"
    if form.short_ids and not re.fullmatch(r"[a-zA-Z0-9]{9}", given):
        return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]
    return given


def _ordered(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of which neighbouring results are in the order of the calls before them."""
    found: list[dict[str, Any]] = []
    order: dict[str, int] = {}
    for is_result, group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        listed = list(group)
        if is_result:
            listed.sort(key=lambda result: order.get(result["tool_call_id"], len(order)))
        for message in listed:
            for call in message.get("tool_calls", ()):
                if isinstance(call, dict):
                    order[call["id"]] = len(order)
        found += listed
    return found


def _with_calls(message: dict[str, Any], form: ChatFormat) -> list[dict[str, Any]]:
    """The messages for one with calls: one for each if the template takes one at a time, text if it shows none."""
    if "tool_calls" not in message:
        return [message]
    calls = [_call(call, form.argument_text) for call in message["tool_calls"]]
    if not form.shows_calls:
        text = "\n".join(
            json.dumps(call.get("function"), ensure_ascii=False) for call in calls if isinstance(call, dict)
        )
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        return [{**rest, "content": f"{message['content']}\n{text}".lstrip("\n")}]
    groups = [calls] if form.several else [[call] for call in calls]
    if form.calls_apart and message["content"]:
        said = {key: value for key, value in message.items() if key != "tool_calls"}
        return [said, *({"role": message["role"], "content": "", "tool_calls": group} for group in groups)]
    first = {**message, "tool_calls": groups[0]}
    return [first, *({**message, "content": "", "tool_calls": group} for group in groups[1:])]


def _call(call: Any, as_text: bool) -> Any:
    """An earlier call. Arguments that are no JSON object become the member `arguments` of one."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    given = function.get("arguments")
    if isinstance(given, str) and given:
        given = loaded(given)
    if not isinstance(given, dict):
        given = {} if given in (None, "") else {"arguments": given}
    written = json.dumps(given, ensure_ascii=False) if as_text else given
    return {**call, "function": {**function, "arguments": written}}


def plain_data(value: Any, depth: int = 0) -> Any:
    """A copy of JSON types only, so that a template sees no object with other methods.

    Raises InputError for other types and for values nested too deeply.
    """
    if depth > MAX_DATA_DEPTH:
        raise InputError(f"chat data is nested more than {MAX_DATA_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    for kind, plain in _SCALARS.items():
        if isinstance(value, kind):
            return plain(value)
    if isinstance(value, Mapping):
        return {str(key): plain_data(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain_data(item, depth + 1) for item in value]
    raise InputError(f"chat data holds {type(value).__name__}, which is not JSON")


def _compile(source: str) -> Template:
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """Rejects plain repetition and powers that would exhaust memory; it does not limit time."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            for whole, count in ((left, right), (right, left)):
                if (
                    operator == "*"
                    and hasattr(whole, "__len__")
                    and isinstance(count, int)
                    and len(whole) * count > MAX_PROMPT_CHARACTERS
                ):
                    raise SecurityError(f"repetition to more than {MAX_PROMPT_CHARACTERS} elements")
            if operator == "**" and not (abs(left) <= 1 << 32 and abs(right) <= 64):
                raise SecurityError("a power of large numbers")
            return super().call_binop(context, operator, left, right)

    class GenerationTag(Extension):
        """`{% generation %}` marks the assistant's tokens for training; its body is rendered unchanged."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=_strftime_now)
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError, SyntaxError, MemoryError, ValueError, OverflowError) as error:
        line = getattr(error, "lineno", None)
        location = f" (line {line})" if line else ""
        raise InputError(f"the chat template does not parse{location}: {error}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces jinja2's filter, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
