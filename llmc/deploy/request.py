"""From a user's options to files on disk: checks which options a kind takes and needs, and their names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.deploy.base import DeploymentKind, Options, flag_of
from llmc.deploy.quoting import require_image, require_label
from llmc.errors import InputError
from llmc.files import write_texts

if TYPE_CHECKING:
    from llmc.artifacts.oci.reference import Reference


LABELS = ("name", "namespace", "trusted_keys", "api_key_secret")
IMAGES = ("image", "base_image", "tool_image")
REFERENCES = ("bundle_image", "cache_image")
FLAGS = {"pull": "--bundle-volume pull"}
"""Flags whose names differ from their options."""


def options_for(kind: DeploymentKind, given: Mapping[str, Any]) -> Options:
    """The options to render a kind with; `given` by name, with None or () for options not given.

    Raises InputError for options that the kind does not take, required options that are missing, and invalid names.
    """
    said = {name: value for name, value in given.items() if value not in (None, ())}
    named = str(said.get("bundle_path", ""))
    if "bundle_image" in kind.takes and "bundle_image" not in said and named.startswith("oci://"):
        said["bundle_image"] = named  # nodes can pull a bundle that was named by its image
    known = {"name", *kind.takes, *(("bundle_path",) if "bundle" in kind.takes else ())}
    for name in said:
        if name not in known:
            raise InputError(f"{_flag(name)} has no effect on llmc deploy {kind.name}; leave it out")
    for name in kind.needs:
        if name not in said:
            raise InputError(f"llmc deploy {kind.name} needs {_flag(name)}")
    for names, check in ((LABELS, require_label), (IMAGES, require_image), (REFERENCES, _reference)):
        said |= {name: check(_flag(name), said[name]) for name in names if name in said}
    for namespace in said.get("allow_from", ()):
        require_label("--allow-from", namespace)
    found = Options(**said)
    if "max_replicas" in kind.takes and found.max_replicas < found.replicas:
        raise InputError(f"--max-replicas {found.max_replicas} is below --replicas {found.replicas}")
    return found


def _reference(flag: str, text: str) -> Reference:
    from llmc.artifacts.oci.reference import parse_reference

    found = parse_reference(text)
    if found.host is None:
        raise InputError(
            f"{flag} {text!r:.200} is a folder, which nodes cannot pull; name an image, such as oci://host/name:tag"
        )
    return found


def _flag(name: str) -> str:
    return FLAGS.get(name, flag_of(name))


def write(folder: Path, files: Mapping[str, str], *, force: bool = False) -> None:
    """Write texts by path below `folder`, which is created. Files with the same content are left alone.

    Raises InputError, before anything is written, if a file has other content and `force` is not set, and if something
    cannot be written.
    """
    todo = {path: text for path, text in files.items() if not _holds(folder / path, text)}
    there = sorted(str(folder / path) for path in todo if os.path.lexists(folder / path))
    if there and not force:
        raise InputError(f"{', '.join(there)} would be replaced; name another folder with -o, or add --force")
    write_texts(folder, todo, "deployment file")


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() == text.encode()
    except OSError:
        return False
