"""A server's plan in the server's own form: printed, or a folder to paste from.

DIR/environment           NAME=VALUE a line
DIR/arguments             a flag a line, its value quoted as a shell wants it
DIR/<file>                the server's own file, where it reads one: buckets.txt, config.yaml, config.json
DIR/kubernetes-env.yaml   the same for a container: env and args, and the files as a ConfigMap
DIR/report.html           the numbers that justify it
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmc.buckets.servers.base import Export
from llmc.buckets.servers.configuration import ARGUMENTS, ENVIRONMENT
from llmc.errors import InputError
from llmc.files import write_text

KUBERNETES = "kubernetes-env.yaml"
REPORT = "report.html"
MOUNT = "/etc/llmc"
"""Where a container finds the server's own files."""


def environment_text(given: Export) -> str:
    """NAME=VALUE a line."""
    return "".join(f"{name}={value}\n" for name, value in given.environment.items())


def arguments_text(given: Export) -> str:
    """A flag a line, quoted."""
    return "".join(f"{_quoted(argument)}\n" for argument in given.arguments)


def kubernetes_text(given: Export, name: str) -> str:
    """Parts of a pod: the container's env and args, and with files their ConfigMap, volume and mount.

    JSON strings are YAML's too, so that every value is quoted.
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
    """All of it, each part under a line that names it."""
    parts = [(ENVIRONMENT, environment_text(given)), (ARGUMENTS, arguments_text(given)), *given.files.items()]
    return "\n".join(f"# {name}\n{text}" for name, text in parts if text)


def write_folder(folder: Path, given: Export, name: str, report: str) -> list[str]:
    """Write everything to `folder`, which is made; returns the files' names. Each file is whole or not there.

    Values that name one of the files name it in `folder`, absolutely; in Kubernetes, where it is mounted. Raises
    InputError where the folder or a file cannot be written.
    """
    return write_texts(folder, texts_for(folder, given, name) | {REPORT: report}, "configuration")


def texts_for(folder: Path, given: Export, name: str) -> dict[str, str]:
    """What is pasted from `folder`, by file name: all but the report."""
    here = {file: str((folder / file).absolute()) for file in given.files}
    placed = Export(
        {variable: here.get(value, value) for variable, value in given.environment.items()},
        tuple(_placed(argument, here) for argument in given.arguments),
        given.files,
    )
    return {
        ENVIRONMENT: environment_text(placed),
        ARGUMENTS: arguments_text(placed),
        **given.files,
        KUBERNETES: kubernetes_text(given, name),
    }


def write_texts(folder: Path, texts: Mapping[str, str], what: str) -> list[str]:
    """Write texts by file name to `folder`, which is made, and return the names. Raises InputError, naming `what`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror or error}") from None
    for file, text in texts.items():
        write_text(folder / file, text, what)
    return list(texts)


def _quoted(argument: str) -> str:
    flag, blank, value = argument.partition(" ")
    return f"{flag} {_words(value)}" if blank else flag


def _words(value: str) -> str:
    """A value for a shell: words of numbers as they are, since they are several, anything else as one."""
    return value if all(word.isdigit() for word in value.split()) else shlex.quote(value)


def _placed(argument: str, here: Mapping[str, str]) -> str:
    flag, blank, value = argument.partition(" ")
    return f"{flag}{blank}{here.get(value, value)}"


def mounted(given: Export) -> tuple[Mapping[str, str], Sequence[str]]:
    """Variables, and arguments of one word each, of a container that has the server's own files at MOUNT."""

    def placed(value: str) -> str:
        return f"{MOUNT}/{value}" if value in given.files else value

    apart = (argument.partition(" ") for argument in given.arguments)
    return (
        {name: placed(value) for name, value in given.environment.items()},
        [f"{flag}={placed(value)}" if value else flag for flag, _, value in apart],
    )
