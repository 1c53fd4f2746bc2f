"""Quote names and values for the languages of the templates.

A model's name may be any text, so nothing is written unquoted: each filter returns `Written`, and base.py refuses
anything else except whole numbers.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmc.errors import InputError

LONGEST = 40
"""Longest generated name: with the longest resource suffix it fits into Kubernetes' 63 characters."""
_LABEL = re.compile(r"[a-z](?:[a-z0-9-]{0,51}[a-z0-9])?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
_IMAGE = re.compile(
    rf"(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
)


def label(text: str) -> str:
    """A DNS label (RFC 1035) derived from any text: "smollm2-demo" from "org/SmolLM2 demo", "llmc" from "?"."""
    name = re.sub(r"[^a-z0-9]+", "-", text.rpartition("/")[2].lower()).strip("-")[:LONGEST].rstrip("-")
    if not name:
        return "llmc"
    return name if name[0].isalpha() else f"llmc-{name}"[:LONGEST].rstrip("-")


def require_label(flag: str, text: str) -> str:
    """Return `text` if it is a DNS label. Raises InputError otherwise."""
    if not _LABEL.fullmatch(text):
        raise InputError(
            f"{flag} {text!r:.80} is not a Kubernetes name: use at most 53 of a-z, 0-9 and -, a letter first, as in "
            f"{label(text)}"
        )
    return text


def require_image(flag: str, text: str) -> str:
    """Return `text` if it is a container image name. Raises InputError otherwise."""
    if not _IMAGE.fullmatch(text):
        raise InputError(
            f"{flag} {text!r:.80} is not the name of a container image, such as registry.example.com/llmc:0.1.0"
        )
    return text


_MARKUP = re.compile(r"[\\`*_\[\]<>|~@&$]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Written(str):
    """Text quoted for its template's language."""

    __slots__ = ()


def as_yaml(value: Any) -> Written:
    """Quote a text, number, list or mapping as YAML flow style: JSON with YAML escapes for unprintable characters."""
    if isinstance(value, Mapping):
        return Written("{" + ", ".join(f"{as_yaml(str(k))}: {as_yaml(v)}" for k, v in value.items()) + "}")
    if isinstance(value, list | tuple):
        return Written("[" + ", ".join(map(as_yaml, value)) + "]")
    text = json.dumps(value, ensure_ascii=False)
    return Written("".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text))


def as_compose(value: Any) -> Written:
    """Quote as YAML in which Docker Compose replaces no variable."""
    return Written(as_yaml(value).replace("$", "$$"))


def as_gitlab(value: Any) -> Written:
    """Quote as YAML for a variable's value in which GitLab's runner expands no other variable."""
    return as_compose(value)


def as_actions(value: Any) -> Written:
    """Quote as YAML in which GitHub evaluates no expression."""
    return Written(as_yaml(value).replace("${{", "${{ '${{' }}"))


def as_json(value: Any) -> Written:
    """Quote as ASCII JSON, for use inside a text of another language."""
    return Written(json.dumps(value))


def as_shell(value: object) -> Written:
    """Quote as one word for sh; NUL bytes are removed."""
    return Written(shlex.quote(str(value).replace("\0", "")))


def as_words(values: Sequence[object]) -> Written:
    """Quote as words for sh, separated by blanks."""
    return Written(" ".join(map(as_shell, values)))


def as_docker(value: object) -> Written:
    """Quote as one word of a Dockerfile's LABEL, ENV or ARG; unprintable characters, which have no form there, become
    blanks."""
    text = "".join(c if c.isprintable() else " " for c in str(value))
    return Written('"' + "".join(f"\\{c}" if c in '\\"$' else c for c in text) + '"')


def as_unit(value: object) -> Written:
    """Quote as one word of a systemd unit's command or Environment= (systemd.service(5), systemd.syntax(7))."""
    slashed = str(value).replace("\\", "\\\\")
    text = "".join(c if c.isprintable() else "".join(f"\\x{byte:02x}" for byte in c.encode()) for c in slashed)
    return Written('"' + text.replace('"', '\\"').replace("%", "%%") + '"')


def as_unit_argument(value: object) -> Written:
    """Quote as a word of a systemd command, in which variables are replaced too."""
    return Written(as_unit(value).replace("$", "$$"))


def as_markdown(value: object) -> Written:
    """Escape text for a line or table cell of Markdown (CommonMark, Backslash escapes)."""
    line = "".join(c if c.isprintable() else " " for c in str(value))
    return Written(_MARKUP.sub(r"\\\g<0>", line))


def as_variable(value: str) -> Written:
    """The bare name of an environment variable. Such names only come from llmc's own targets and server models."""
    if not _VARIABLE.fullmatch(value):
        raise ValueError(f"{value!r:.80} is not a variable name")
    return Written(value)


def as_line(value: object) -> Written:
    """Text for the rest of a line: a comment, or a unit's Description=."""
    return Written("".join(c if c.isprintable() else " " for c in str(value)).replace("%", "%%"))


FILTERS: Mapping[str, Callable[[Any], Written]] = {
    "yaml": as_yaml, "compose": as_compose, "gitlab": as_gitlab, "actions": as_actions, "json": as_json,
    "sh": as_shell, "words": as_words, "docker": as_docker, "unit": as_unit, "argument": as_unit_argument,
    "line": as_line, "variable": as_variable,
}  # fmt: skip
