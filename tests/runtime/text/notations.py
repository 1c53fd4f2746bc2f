"""Small chat templates, each with another notation of tool calls, and what their models write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from llmc.runtime.text.chat import ChatTemplate

Call = tuple[str, dict[str, Any]]

HEAD = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}"
    "<|{{ m.role }}|>{% if m.tool_calls is defined %}"
)
TAIL = "{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
ARGUMENTS = "{{ f.arguments | tojson }}"


def template(calls: str) -> str:
    return HEAD + calls + TAIL


HERMES = template(
    EACH + '{% if not loop.first %}\n{% endif %}<tool_call>\n{"name": "{{ f.name }}", "arguments": ' + ARGUMENTS + "}"
    "\n</tool_call>{% endfor %}"
)
LLAMA = template(EACH + '{"name": "{{ f.name }}", "parameters": ' + ARGUMENTS + "}{% endfor %}")
MISTRAL = template(
    "[TOOL_CALLS] [" + EACH + '{"name": "{{ f.name }}", "arguments": ' + ARGUMENTS + ', "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]"
)
BY_NAME = template(
    "<|tools|>["
    + EACH
    + '{"{{ f.name }}": '
    + ARGUMENTS
    + "}{% if not loop.last %}, {% endif %}{% endfor %}]<|tools_end|>"
)
NAMED = template(EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]" + ARGUMENTS + "{% endfor %}")
FENCED = template(
    "<calls>" + EACH + "<call>function<sep>{{ f.name }}\n```json\n" + ARGUMENTS + "\n```</call>{% endfor %}</calls>"
)
WITH_IDS = template(
    "<section>"
    + EACH
    + "<call>functions.{{ f.name }}:{{ loop.index0 }}<args>"
    + ARGUMENTS
    + "</call>{% endfor %}</section>"
)
VALUE = "{{ v if v is string else v | tojson }}"
TAGS = template(
    EACH + "{% if not loop.first %}\n{% endif %}<tool_call>\n<function={{ f.name }}>\n"
    "{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n" + VALUE + "\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)
PAIRS = template(
    EACH + "\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>" + VALUE + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
)
TYPED = template(
    "\n<calls>\n"
    + EACH
    + '<invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}<parameter name="{{ k }}" '
    'string="{{ "true" if v is string else "false" }}">'
    + VALUE
    + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</calls>"
)
PYTHON = template(
    "[" + EACH + "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]"
)
BARE = template(
    EACH + '<|tool_call>call:{{ f.name }}{{ "{" }}{% for k, v in f.arguments.items() %}{{ k }}:'
    "{% if v is string %}<|q|>{{ v }}<|q|>{% else %}{{ v | tojson }}{% endif %}{% if not loop.last %},{% endif %}"
    '{% endfor %}{{ "}" }}<tool_call|>{% endfor %}'
)
HARMONY = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}"
    "{% if m.tool_calls is defined %}{% set f = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>" + ARGUMENTS + "<|call|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{# <|channel|>analysis #}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ALL = {
    "hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "by name": BY_NAME, "named": NAMED, "fenced": FENCED,
    "with ids": WITH_IDS, "tags": TAGS, "pairs": PAIRS, "typed": TYPED, "python": PYTHON, "bare": BARE,
    "harmony": HARMONY,
}  # fmt: skip
ONE_AT_A_TIME = ("harmony",)

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "object"},
        "flag": {"type": "boolean"}, "items": {"type": "array"},
    },
    "required": ["city"],
}  # fmt: skip
FUNCTIONS = {"get_weather": SCHEMA, "read-file.v2": SCHEMA, "now": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in FUNCTIONS.items()]


class Written(NamedTuple):
    """What a template writes for an answer."""

    prompt: str
    text: str


def written(source: str, calls: Sequence[Call], as_given: Callable[[Mapping[str, Any]], Any] = dict) -> Written:
    """An answer of `calls` as the template `source` writes it, and the prompt before it."""
    user = {"role": "user", "content": "Hello"}
    listed = [
        {"id": f"call{i}", "type": "function", "function": {"name": name, "arguments": as_given(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    rendered = ChatTemplate(source)
    prompt = rendered.render([user], tools=TOOLS)
    whole = rendered.render(
        [user, {"role": "assistant", "tool_calls": listed}], tools=TOOLS, add_generation_prompt=False
    )
    assert whole.startswith(prompt)
    ends = ("<|end|>\n", "<|call|>")
    text = whole[len(prompt) :]
    return Written(prompt, next((text.removesuffix(end) for end in ends if text.endswith(end)), text))


def as_text(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments)
