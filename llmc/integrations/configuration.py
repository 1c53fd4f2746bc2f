"""A server's configuration, read and written: a folder, its own file, its flags and variables, its log.

    DIR/environment           NAME=VALUE a line
    DIR/arguments             a flag a line, its value quoted for a shell
    DIR/<file>                the server's own file, where it reads one: buckets.txt, config.yaml, config.json
    DIR/kubernetes-env.yaml   the same for a container: env and args, and the files as a ConfigMap
    DIR/report.html           the numbers that justify it

A .yaml file is the server's own. The type of any other text follows from its content: llmc's plans are JSON objects
with a "schema"; flags and variables are a command line or lines of either; a log holds the list that the server
printed; everything else is the server's own file.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from llmc.buckets.plan import Plan
from llmc.errors import InputError
from llmc.files import write_texts
from llmc.integrations import arguments
from llmc.integrations.base import Accepted, BucketRules, Export, Lists, Setup
from llmc.integrations.plan import ServerPlan
from llmc.integrations.settings import Value, complete, flags_of, from_flags
from llmc.json_fields import Fields

ENVIRONMENT, ARGUMENTS = "environment", "arguments"
OWN_FILES = (".txt", ".yaml", ".yml", ".json")
MAX_FILE = 64 << 20
"""Most bytes of a configuration's file; a log may be larger."""

_VARIABLE = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)
T = TypeVar("T")
_FLAG = re.compile(r"(?:^|\s)(?:--[a-z][\w-]+|-(?:O|cc)[.=\s])", re.ASCII)


@dataclass(frozen=True)
class Configuration:
    """One server's configuration; `name` is its source."""

    name: str
    setup: Setup
    lists: Lists

    def accepted(self, server: BucketRules) -> Accepted:
        """Apply the server's filters. Raises InputError, naming the source, where it would exit at start."""
        try:
            return server.accept(self.setup, self.lists)
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from None


def setup_for(server: BucketRules, limits: Mapping[str, int], own: Mapping[str, Value]) -> Setup:
    """Return the setup of a server with these limits and settings, and its own defaults for the rest.

    Raises InputError without max_model_len, and for limits and settings that the server refuses.
    """
    if "max_model_len" not in limits:
        raise InputError(f"{server.name} needs max_model_len, the tokens of one sequence: give --max-model-len N")
    return Setup(server.limits(limits), complete(server.settings, own))


def load(server: BucketRules, source: str, limits: Mapping[str, int], own: Mapping[str, Value]) -> Configuration:
    """Load the configuration at `source`, a folder or a file; `limits` and `own` are additional given values.

    Raises InputError, naming file and line where known, for an unreadable file, for contents that the server would skip
    or refuse, for limits or settings that disagree with the given ones, and without max_model_len.
    """
    path = Path(source)
    if path.is_dir():
        return _of(server, source, _folder(path), limits, own)
    head = _head(path)
    if head.lstrip().startswith("{") and len(head) <= MAX_FILE:
        fields = Fields.parse(head, source)
        if "schema" in fields.names():
            return _of_plan(server, source, head, "server" in fields.names(), limits, own)
        return _own_file(server, source, head, limits, own)
    if path.suffix in (".yaml", ".yml"):
        return _own_file(server, source, _whole(path), limits, own)
    if _is_command(head):
        return _of(server, source, _with_files(_command(head, source), path.parent), limits, own)
    stated: dict[str, Value] = {}
    found = server.read_log(_noting(_lines(path), server, stated))
    if found is not None:
        return Configuration(source, setup_for(server, limits, {**stated, **own}), found)
    return _own_file(server, source, head, limits, own)


def _own_file(
    server: BucketRules, source: str, text: str, limits: Mapping[str, int], own: Mapping[str, Value]
) -> Configuration:
    """`text` as the server reads it from a file of this name. Raises InputError where the server uses none of it."""
    name = Path(source).name
    found = _of(server, source, Export(files={name: text}), limits, own)
    try:
        unread = server.read(Export(files={name: "\0"}), found.setup) == found.lists
    except InputError:
        unread = False
    if unread:
        raise InputError(
            f"{source}: has neither flags or variables of {server.name} nor, as a log, its list, and is no file of its"
        )
    return found


def _of(
    server: BucketRules, source: str, given: Export, limits: Mapping[str, int], own: Mapping[str, Value]
) -> Configuration:
    flags = arguments.flags(given)
    stated: dict[str, int] = {}
    for spelled, name in server.limit_flags.items():
        flag = spelled.replace("_", "-")
        if flag in flags:
            if not flags[flag].isascii() or not flags[flag].isdigit():
                raise InputError(f"{source}: {flag} {flags[flag]!r} is not a whole number")
            stated[name] = int(flags[flag])
    try:
        settings = from_flags(server.settings, flags, given.environment)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    setup = setup_for(server, _agreed(source, stated, limits), _agreed(source, settings, own))
    try:
        return Configuration(source, setup, server.read(given, setup))
    except InputError as error:
        raise error if str(error).startswith(source) else InputError(f"{source}: {error}") from None


def _of_plan(
    server: BucketRules, source: str, text: str, servers: bool, limits: Mapping[str, int], own: Mapping[str, Value]
) -> Configuration:
    if servers:
        built = ServerPlan.from_json(text, source)
        if built.server != server.name:
            raise InputError(f"{source} is a plan for {built.server}, not for {server.name}; export a plan for each")
        _agreed(source, built.setup.limits.to_dict(), limits)
        _agreed(source, built.setup.own, own)
        return Configuration(source, built.setup, built.lists)
    plan = Plan.from_json(text, source)
    setup = setup_for(server, _agreed(source, plan.limits.to_dict(), limits), own)
    return Configuration(source, setup, server.from_plan(setup, plan))


def _agreed(source: str, stated: Mapping[str, T], given: Mapping[str, T]) -> dict[str, T]:
    for name, value in given.items():
        if name in stated and stated[name] != value:
            raise InputError(
                f"{source} says {name} {stated[name]}, but {value} was given: leave the flag out, or name "
                "the configuration that the server runs with"
            )
    return {**stated, **given}


def _folder(path: Path) -> Export:
    """The contents of a folder exported by llmc: the variables file, the flags file, and the server's own files."""
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    texts = {name: _whole(path / name) for name in names if not name.endswith(".html")}
    environment = _command(texts.pop(ENVIRONMENT, ""), str(path / ENVIRONMENT)).environment
    arguments = _command(texts.pop(ARGUMENTS, ""), str(path / ARGUMENTS)).arguments
    texts.pop(KUBERNETES, None)
    if not environment and not arguments and not texts:
        raise InputError(
            f"{path} holds no configuration; a folder that llmc exported has {ENVIRONMENT} and {ARGUMENTS}"
        )
    return Export(environment, arguments, {str(path / name): text for name, text in texts.items()})


def _with_files(given: Export, folder: Path) -> Export:
    """`given`, with the server's own files that its values name, relative to the command or anywhere."""
    named = [value for value in _values(given) if value.endswith(OWN_FILES) and (folder / value).is_file()]
    return Export(given.environment, given.arguments, {value: _whole(folder / value) for value in named})


def _is_command(text: str) -> bool:
    """Whether every line, continued ones joined, has a flag or is a variable."""
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    return bool(lines) and all(_VARIABLE.fullmatch(line) or _FLAG.search(line) for line in lines)


def _command(text: str, source: str) -> Export:
    """Variables and flags of a command line, or of lines of either. Raises InputError for unterminated quotes."""
    environment: dict[str, str] = {}
    words: list[str] = []
    for number, line in enumerate(text.replace("\\\n", " ").splitlines(), 1):
        try:
            parts = shlex.split(line, comments=True)
        except ValueError as error:
            raise InputError(f"{source}:{number}: {error}; quote the value whole") from None
        while parts and (match := _VARIABLE.fullmatch(parts[0])):
            environment[match[1]] = match[2]
            parts.pop(0)
        words += parts
    flags = flags_of(words)
    return Export(environment, tuple(f"{name} {value}".rstrip() for name, value in flags.items()))


def _head(path: Path) -> str:
    """The text of a file that is not a log; only the beginning of a larger file, which can only be a log."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise InputError(f"cannot read the configuration {path}: {error.strerror or error}") from None
    return data.decode("utf-8", errors="replace")


def _whole(path: Path) -> str:
    text = _head(path)
    if len(text) > MAX_FILE:
        raise InputError(f"{path}: has more than {MAX_FILE} bytes; a configuration is far smaller")
    return text


def _noting(lines: Iterable[str], server: BucketRules, stated: dict[str, Value]) -> Iterator[str]:
    """`lines`; settings that they contain are added to `stated`."""
    for text in lines:
        for name, pattern in server.logged.items():
            if match := pattern.search(text):
                stated[name] = match[1]
        yield text


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file


KUBERNETES = "kubernetes-env.yaml"
REPORT = "report.html"
MOUNT = "/etc/llmc"
"""Folder of the server's own files in a container."""


def environment_text(given: Export) -> str:
    """Return NAME=VALUE lines."""
    return "".join(f"{name}={value}\n" for name, value in given.environment.items())


def arguments_text(given: Export) -> str:
    """Return one quoted flag per line."""
    return "".join(f"{_quoted(argument)}\n" for argument in given.arguments)


def kubernetes_text(given: Export, name: str) -> str:
    """Return parts of a pod: the container's env and args, and with files their ConfigMap, volume and mount.

    JSON strings are valid YAML, so every value is quoted as JSON.
    """
    lines = ["# for the container that runs the server"]
    environment, arguments = mounted(given)
    if environment:
        lines.append("env:")
        for variable, value in environment.items():
            lines += [f"  - name: {variable}", f"    value: {json.dumps(value)}"]
    if arguments:
        lines += ["args:", *(f"  - {json.dumps(argument)}" for argument in arguments)]
    if given.files:
        config = f"llmc-{name}"
        lines += ["volumeMounts:", f"  - name: {config}", f"    mountPath: {MOUNT}", "    readOnly: true"]
        lines += ["# for its pod", "volumes:", f"  - name: {config}", "    configMap:", f"      name: {config}", "---"]
        lines += ["apiVersion: v1", "kind: ConfigMap", "metadata:", f"  name: {config}", "data:"]
        for file, text in given.files.items():
            lines += [f"  {json.dumps(file)}: |", *(f"    {line}" for line in text.splitlines())]
    return "\n".join(lines) + "\n"


def as_text(given: Export) -> str:
    """Return all parts, each under a line that names it."""
    parts = [(ENVIRONMENT, environment_text(given)), (ARGUMENTS, arguments_text(given)), *given.files.items()]
    return "\n".join(f"# {name}\n{text}" for name, text in parts if text)


def write_folder(folder: Path, given: Export, name: str, report: str, notes: Sequence[str] = ()) -> list[str]:
    """Write everything to `folder`, creating it; return the files' names. Each file is written atomically.

    `notes` on the origin are comments in each file whose format has them. Raises InputError where the folder or a file
    cannot be written.
    """
    return write_texts(folder, texts_for(given, name, notes) | {REPORT: report}, "configuration")


def texts_for(given: Export, name: str, notes: Sequence[str] = ()) -> dict[str, str]:
    """Return the contents of a configuration's folder by file name, without the report.

    Values name the server's own files by their paths in the folder, and in Kubernetes by their mount paths.
    """
    notes = [*notes, *given.notes]
    values = _values(given)
    named = [file for file in given.files if file in values]
    started = [f"{' and '.join(named)}: found from the folder in which the server starts"] if named else []
    return {
        ENVIRONMENT: _comments([*notes, *started]) + environment_text(given),
        ARGUMENTS: _comments([*notes, f"grep -v '^#' {ARGUMENTS} | xargs SERVER", *started]) + arguments_text(given),
        **{file: ("" if file.endswith(".json") else _comments(notes)) + text for file, text in given.files.items()},
        KUBERNETES: _comments(notes) + kubernetes_text(given, name),
    }


def _comments(notes: Iterable[str]) -> str:
    return "".join(f"# {note}\n" for note in notes)


def _values(given: Export) -> list[str]:
    """The values of variables and flags."""
    return [*given.environment.values(), *(argument.partition(" ")[2] for argument in given.arguments)]


def _quoted(argument: str) -> str:
    flag, blank, value = argument.partition(" ")
    return f"{flag} {_words(value)}" if blank else flag


def _words(value: str) -> str:
    """A value for a shell: words of numbers unquoted, since they are several values, anything else quoted."""
    return value if all(word.isdigit() for word in value.split()) else shlex.quote(value)


def mounted(given: Export) -> tuple[Mapping[str, str], Sequence[str]]:
    """Return variables, and one-word arguments, of a container that has the server's own files at MOUNT."""

    def placed(value: str) -> str:
        return f"{MOUNT}/{value}" if value in given.files else value

    apart = (argument.partition(" ") for argument in given.arguments)
    return (
        {name: placed(value) for name, value in given.environment.items()},
        [f"{flag}={placed(value)}" if value else flag for flag, _, value in apart],
    )
