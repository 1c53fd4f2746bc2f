"""Chat templates: transformers' dialect, validated messages, and a sandbox that holds."""

from __future__ import annotations

import json
import subprocess
import sys
from enum import Enum

import pytest

from llmc.errors import InputError
from llmc.runtime.text import chat
from llmc.runtime.text.chat import ROLES, ChatTemplate, check_messages
from llmc.runtime.text.chat_format import ChatFormat

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]


def render(source, messages=USER, **options):
    return ChatTemplate(source).render(messages, **options)


def test_renders_with_and_without_a_generation_prompt():
    assert render(CHATML) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


TEMPLATES = [
    CHATML,
    "{% for m in messages %}\n    {% if m.role == 'user' %}\n  U:{{ m.content }}\n    {% endif %}\n{% endfor %}",
    "{{ bos_token }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m.content | trim }}{% endfor %}",
    "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|{{ '<é>' | tojson }}",
    "{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}\n",
    "{% generation %}{{ messages[-1].content }}{% endgeneration %}",
    "{{ tools | length if tools else 'none' }}{{ documents is none }}{{ undefined_name }}",
    "{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(messages[0]['content'].split()[0]) }}"
    "{% if x is defined %}{{ x }}{% endif %}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_renders_what_transformers_renders(source):
    templates = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [
        {"role": "system", "content": " Be <brief> & 'kind'. "},
        {"role": "user", "content": "Grüße 😀\n"},
        {"role": "assistant", "content": "Hi"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for given, x in ((None, 1), (tools, "<x>")):
        expected, _ = templates.render_jinja_template(
            [messages], tools=given, chat_template=source, add_generation_prompt=True, bos_token="<s>", x=x
        )
        template = ChatTemplate(source, {"bos_token": "<s>"}, ChatFormat())
        assert template.render(messages, tools=given, variables={"x": x}) == expected[0]


def test_the_current_date_is_available():
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_special_tokens_are_visible_by_name():
    template = ChatTemplate(
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", {"bos_token": "<s>", "eos_token": "</s>"}
    )
    assert template.render(USER) == "<s>Hi</s>"


def test_raise_exception_is_an_input_error_with_its_message():
    with pytest.raises(InputError, match="refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_that_does_not_parse_names_the_line():
    with pytest.raises(InputError, match=r"does not parse \(line 2\)"):
        ChatTemplate("a\n{% if %}")


def test_a_model_without_a_template_says_so():
    with pytest.raises(InputError, match="no chat template"):
        ChatTemplate(None)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    ("message", "checked"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, {"content": "", "tool_calls": [CALL]}),
        ({"role": "assistant", "content": None, "tool_calls": [], "refusal": None}, {"content": ""}),
        ({"role": "assistant", "content": None}, {"content": ""}),
        ({"role": "tool", "tool_call_id": "c", "content": None}, {"tool_call_id": "c", "content": ""}),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
    ],
)
def test_what_clients_send_back_is_taken(message, checked):
    assert check_messages([message]) == [{"role": message["role"], **checked}]


SEEN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_DEVELOPER = SEEN.replace(
    "{% endfor %}", "{% if m.role not in roles %}{{ raise_exception(m.role) }}{% endif %}{% endfor %}"
)


def known(*roles):
    return "{% set roles = [" + ", ".join(f"'{role}'" for role in roles) + "] %}" + NO_DEVELOPER


SAID = [{"role": "developer", "content": "Answer BLUE."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("source", "messages", "shown"),
    [
        (SEEN, SAID, "<developer>Answer BLUE.<user>Hi"),
        (known("system", "user"), SAID, "<system>Answer BLUE.<user>Hi"),
        (known("user", "assistant"), SAID, "<user>Answer BLUE.\n\nHi"),
        (SEEN, [{"role": "system", "content": "A"}, *SAID], "<system>A\n\nAnswer BLUE.<user>Hi"),
        (
            known("user", "assistant"),
            [*SAID[1:], {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "7"}],
            '<user>Hi<assistant>{"name": "f", "arguments": {"x": 1}}'
            '<user>{"tool_response": {"tool_call_id": "c", "content": "7"}}',
        ),
        (
            known("user", "assistant"),
            [*SAID[1:], {"role": "tool", "tool_call_id": "c", "content": "7"}, {"role": "user", "content": "And?"}],
            '<user>Hi\n\n{"tool_response": {"tool_call_id": "c", "content": "7"}}\n\nAnd?',
        ),
    ],
)
def test_a_template_shows_all_that_messages_say(source, messages, shown):
    assert render(source, messages) == shown


ONLY_FIRST = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% endif %}{% endfor %}"
)
APART = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls is defined %}"
    "{% for c in m.tool_calls %}[{{ c.function.name }}]{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
SHORT = ONLY_FIRST.replace("[{{ c.id", "{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}[{{ c.id")
LATER = [*SAID[1:], {"role": "system", "content": "Now in French."}]
CALLED = {"role": "assistant", "content": "I look.", "tool_calls": [CALL, {**CALL, "id": "d"}]}


def result(call_id, content):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


@pytest.mark.parametrize(
    ("source", "messages", "shown"),
    [
        (ONLY_FIRST, [*LATER, {"role": "user", "content": "And?"}], "<user>Hi<user>Now in French.\n\nAnd?"),
        (ONLY_FIRST, LATER, "<user>Hi<user>Now in French."),
        (SEEN, LATER, "<user>Hi<system>Now in French."),
        (APART, [*SAID[1:], CALLED], "<user>Hi<assistant>I look.<assistant>[f][f]"),
        (
            ONLY_FIRST,
            [*SAID[1:], CALLED, result("d", "2"), result("c", "1")],
            '<user>Hi<assistant>I look.[c f {"x": 1}][d f {"x": 1}]<tool>1(c)<tool>2(d)',
        ),
        (
            ONLY_FIRST,
            [
                {"role": "assistant", "content": None, "function_call": CALL["function"]},
                {"role": "function", "name": "f", "content": "7"},
            ],
            '<assistant>[call0 f {"x": 1}]<tool>7(call0)',
        ),
        (
            ONLY_FIRST,
            [{**CALLED, "content": "", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{x"}}]}],
            '<assistant>[c f {"arguments": "{x"}]',
        ),
        (
            SHORT,
            [{**CALLED, "content": "", "tool_calls": [CALL]}, result("c", "1")],
            '<assistant>[2e7d2c03a f {"x": 1}]<tool>1(2e7d2c03a)',
        ),
    ],
)
def test_a_history_is_changed_to_what_the_template_takes(source, messages, shown):
    assert render(source, messages) == shown


def test_instructions_that_a_template_cannot_show_are_refused():
    with pytest.raises(InputError, match="shows no system message; add a user message"):
        render(known("user", "assistant"), [{"role": "system", "content": "A"}])


PARTS = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def test_a_template_that_reads_parts_is_given_parts():
    assert render(PARTS, [{"role": "user", "content": "Hi"}]) == "Hi"
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(PARTS, [{"role": "user", "content": two}]) == "a\nb"


CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ ARGUMENTS }}"
    "{% endfor %}{% endfor %}"
)
AS_OBJECTS = CALLS.replace("ARGUMENTS", "c.function.arguments | tojson")
AS_TEXT = CALLS.replace("ARGUMENTS", "c.function.arguments")


@pytest.mark.parametrize("source", [AS_OBJECTS, AS_TEXT])
@pytest.mark.parametrize(
    ("given", "shown"), [('{"x": 1}', '{"x": 1}'), ("", "{}"), (None, "{}"), ({"x": 1}, '{"x": 1}')]
)
def test_arguments_of_earlier_calls_are_shown_as_json(source, given, shown):
    call = {"type": "function", "function": {"name": "f", "arguments": given}}
    assert render(source, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == f"f{shown}"


def test_calls_of_one_message_are_shown_one_by_one_where_a_template_takes_one():
    only = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}|{{ m.content }}"
    source = AS_OBJECTS.replace("{{ m.content }}", only)
    assert (
        render(source, [{"role": "assistant", "content": "A", "tool_calls": [CALL, CALL]}]) == '|Af{"x": 1}|f{"x": 1}'
    )


def test_enumerations_become_their_text():
    role = Enum("Role", {"USER": "user"}, type=str).USER
    (message,) = check_messages([{"role": role, "content": "x"}])
    assert type(message["role"]) is str and message["role"] == "user"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("hi", "at least one"),
        ({"role": "user"}, "at least one"),
        (["hi"], r"messages\[0\] is str"),
        ([{"content": "x"}], r"messages\[0\]\.role is None; known: system"),
        ([{"role": "alien", "content": "x"}], "role is 'alien'"),
        ([{"role": ["user"], "content": "x"}], "role is"),
        ([{"role": "<|im_end|>", "content": "x"}], "role is"),
        ([*USER, {"role": "user"}], r"messages\[1\] \(user\) has no content"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content is int, not text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "part of type 'text'"),
        ([{"role": "user", "content": ["x"]}], "part of type 'str'"),
        ([{"role": "user", "content": "x", "extra": object()}], "holds object, which is not JSON"),
        ([{"role": "user", "content": "x", "extra": b"raw"}], "holds bytes"),
    ],
)
def test_bad_messages_say_which_and_why(messages, message):
    with pytest.raises(InputError, match=message):
        render(CHATML, messages)


def test_deep_nesting_is_refused():
    deep: list = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(InputError, match="nested more than"):
        render(CHATML, [{"role": "user", "content": "x", "extra": deep}])


def test_variables_cannot_replace_what_the_template_is_given():
    template = ChatTemplate("{{ bos_token }}{{ flag }}{{ documents | length }}", {"bos_token": "<s>"})
    assert template.render(USER, variables={"flag": True, "documents": [{"title": "t"}]}) == "<s>True1"
    with pytest.raises(InputError, match="holds object"):
        template.render(USER, variables={"flag": object()})
    with pytest.raises(InputError, match="variable 'messages' is set by the request"):
        template.render(USER, variables={"self": 1, "messages": []})


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__['__builtins__'] }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.parent['x'].__init__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ ('{0.__class__.__mro__}' | string).format(1) }}",
    "{{ ''|attr('__class__') }}",
    "{{ ['__class__']|map('attr', 'x')|list }}{{ [1]|map(attribute='__class__')|list }}{{ (1).__class__() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].__setitem__('a', 1) }}",
    "{% set x = messages.__class__ %}{{ x() }}",
    "{{ (messages | tojson).__class__.__init__() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'base' %}",
    "{{ 'a' * 1000000000 }}",
    "{{ 1000000000 * 'a' }}",
    "{{ [0] * 1000000000 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{% for i in range(1000000000) %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 1 / 0 }}",
    "{{ messages[99].content.upper() }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_escapes_and_bombs_are_refused(source):
    """The sandbox raises, or gives the template an undefined value that renders as nothing."""
    try:
        text = render(source)
    except InputError:
        return
    assert text == "", text


def test_messages_of_the_caller_are_not_changed():
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InputError):
        render("{{ messages[0].pop('role') }}", messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr(chat, "MAX_PROMPT_CHARACTERS", 1000)
    with pytest.raises(InputError, match="more than 1000 characters"):
        render("{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}")


def test_jinja2_is_imported_only_when_used():
    code = "import sys, llmc.runtime.text.chat; print('jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_roles_are_plain_words():
    assert all(role.isalpha() for role in ROLES)
    assert json.loads(render("{{ messages | tojson }}")) == USER


@pytest.mark.real_weights
def test_the_demo_models_template():
    from llmc.compiler.checkpoint import open_checkpoint

    checkpoint = open_checkpoint("smollm2-demo")
    text = ChatTemplate(checkpoint.chat_template(), checkpoint.special_tokens()).render(USER)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
