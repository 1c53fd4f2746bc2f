"""A server's own settings: declared once, read from its flags and variables, and written back in the same form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmc.errors import InputError, UnknownNameError

Value = bool | int | float | str | None

TRUE, FALSE = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f")


@dataclass(frozen=True)
class Setting:
    """A number, switch or word that a server's rules depend on.

    name      spelling in llmc's --set and JSON
    kind      type of its value; a `default` None means that the server derives it
    flag      the server's command-line flag, or ""
    variable  the server's environment variable, or ""
    path      keys into a flag whose value is a JSON object, as in ("compilation_config", "max_size")
    choices   all allowed words, where there are few
    also      other names of the flag
    """

    name: str
    kind: type[bool] | type[int] | type[float] | type[str]
    default: Value
    help: str
    flag: str = ""
    variable: str = ""
    path: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    least: int | None = None
    also: tuple[str, ...] = ()

    @property
    def spelling(self) -> str:
        """The name that the server's users know."""
        return self.variable or ".".join((self.flag, *self.path)) or self.name

    def parse(self, text: str) -> Value:
        """Parse `text` as a value. Raises InputError for invalid text."""
        if self.kind is bool:
            word = text.strip().lower()
            if word in TRUE or word in FALSE:
                return word in TRUE
            raise InputError(f"{self.spelling} {text!r} is neither true nor false")
        try:
            return self.check(self.kind(text))
        except ValueError:
            raise InputError(f"{self.spelling} {text!r} is not of type {self.kind.__name__}") from None

    def check(self, value: Value) -> Value:
        """Return `value` if the setting allows it. Raises InputError, or UnknownNameError for an unknown word."""
        if value is None:
            return None
        fits = isinstance(value, (int, float) if self.kind is float else self.kind)
        if not fits or (isinstance(value, bool) and self.kind is not bool):
            raise InputError(f"{self.spelling} {value!r} must be of type {self.kind.__name__}")
        if self.choices and value not in self.choices:
            raise UnknownNameError(self.name.replace("_", " "), str(value), self.choices)
        if self.least is not None and not isinstance(value, str) and value < self.least:
            raise InputError(f"{self.spelling} {value} must be at least {self.least}")
        return value


def release(server: str, text: str) -> tuple[int, ...]:
    """Parse a release as numbers, "0.24" as (0, 24). Raises InputError for invalid text."""
    if not re.fullmatch(r"\d+(\.\d+)+", text):
        raise InputError(f"{server}: {text!r} is not a release; write it as 0.24")
    return tuple(map(int, text.split(".")))


SPECULATION = "--speculative-config"
DRAFTS = Setting(
    "num_speculative_tokens", int, 0, "Draft tokens of a step.", SPECULATION, path=("num_speculative_tokens",), least=0
)
SPECULATIVE = (
    DRAFTS,
    Setting("speculative_method", str, None, "How drafts are made, as ngram or eagle3.", SPECULATION, path=("method",)),
    Setting("speculative_model", str, None, "The model that makes drafts.", SPECULATION, path=("model",)),
)
"""vLLM's."""


def complete(settings: Sequence[Setting], given: Mapping[str, Value]) -> dict[str, Value]:
    """Return all `settings` by name: the given value, checked, or the default.

    Raises like `Setting.check`, and for an unknown name.
    """
    known = {setting.name: setting for setting in settings}
    for name in given:
        if name not in known:
            raise UnknownNameError("setting of this server", name, sorted(known))
    return {name: known[name].check(given.get(name, known[name].default)) for name in known}


def from_flags(
    settings: Sequence[Setting], flags: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, Value]:
    """Return the values of `settings` in a command line and an environment, by name.

    A flag takes precedence, also as "--no-name" for a switch. `flags` maps "--name" to its text ("" for a switch).
    Raises InputError for invalid text.
    """
    found: dict[str, Value] = {}
    for setting in settings:
        if setting.variable and environment.get(setting.variable):
            found[setting.name] = setting.parse(environment[setting.variable])
        if setting.kind is bool and setting.flag.replace("--", "--no-", 1) in flags:
            found[setting.name] = False
        elif flag := next((name for name in (setting.flag, *setting.also) if name in flags), ""):
            text = flags[flag]
            if setting.path:
                value = within(flag, text, setting.path)
                if value is not None:
                    found[setting.name] = setting.check(value)  # type: ignore[arg-type]
            elif setting.kind is bool and text == "":
                found[setting.name] = True
            else:
                found[setting.name] = setting.parse(text)
    return found


def within(flag: str, text: str, path: Sequence[str]) -> object:
    """Return the value at `path` of the JSON object given to `flag`, or None. Raises InputError where it is not an
    object.
    """
    try:
        location: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{flag}: not valid JSON: {error}; quote the whole object") from None
    for depth, key in enumerate(path):
        if not isinstance(location, dict):
            raise InputError(f"{'.'.join((flag, *path[:depth]))} must be a JSON object")
        if key not in location:
            return None
        location = location[key]
    return location


def flags_of(arguments: Sequence[str]) -> dict[str, str]:
    """Return flags with their values from words of a command line: "--a 1", "--a=1", and "--a", a switch, with "".

    A dash within a name may be written as an underscore, which servers' parsers allow. The last of two equal flags
    wins. Words that belong to no flag are ignored, such as a model's name or a command. Following vLLM's parser,
    "--a.b.c 1" is the value at b.c of the JSON object "--a", "--a.b+ 1,2" adds to a list, and short flags are accepted.
    """
    found: dict[str, str] = {}
    parts: dict[str, str] = {}
    into, name = found, ""
    for word in _long(arguments):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            name, dot, path = name.partition(".")
            into, name = parts if dot else found, name.replace("_", "-") + dot + path
            into[name] = value
            if equals:
                name = ""
        elif name:
            into[name] = f"{into[name]} {word}".strip()
    for dotted, value in parts.items():
        flag, *keys = dotted.removesuffix("+").split(".")
        found[flag] = _joined(flag, found.get(flag, "{}"), keys, value, dotted.endswith("+"))
    return found


SHORT = {
    "-O": "--compilation-config", "-cc": "--compilation-config", "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
}  # fmt: skip
"""vLLM's short flags. -O0 to -O3 are --optimization-level."""


def _long(arguments: Sequence[str]) -> Iterator[str]:
    for before, word, after in zip(["", *arguments], arguments, [*arguments[1:], ""], strict=False):
        end = min((location for location in (word.find("="), word.find(".")) if location >= 0), default=len(word))
        level = word if before == "-O" else word.removeprefix("-O").removeprefix("=") if word[:2] == "-O" else ""
        if level.isdigit():
            yield f"--optimization-level={level}"
        elif word != "-O" or not after.isdigit():
            yield SHORT.get(word[:end], word[:end]) + word[end:]


def _joined(flag: str, text: str, path: Sequence[str], value: str, adds: bool) -> str:
    """The JSON object `text` with `value` at `path`. Raises InputError where `path` does not lead through objects."""
    root = within(flag, text, ())
    location: object = root
    for key in path[:-1]:
        location = location.setdefault(key, {}) if isinstance(location, dict) else None
    if not isinstance(location, dict):
        raise InputError(f"{'.'.join((flag, *path))}: {flag} has no object there; state the whole in JSON")
    if adds:
        before = location.get(path[-1], [])
        location[path[-1]] = [*(before if isinstance(before, list) else [before]), *map(_read, value.split(","))]
    else:
        location[path[-1]] = _read(value)
    return json.dumps(root)


def _read(value: str) -> object:
    try:
        found: object = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found
