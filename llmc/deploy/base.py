"""The contract of a deployment kind: options in, texts by path out. A kind is a class and a line in KINDS.

A kind knows a bundle only through its manifest (`BundleFacts`), opens no other file of it and starts nothing.
`options_for` checks what a user gave, and `write` writes the files.
"""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from llmc.deploy.quoting import FILTERS, Written, label, require_image, require_label
from llmc.errors import InputError
from llmc.files import write_texts
from llmc.version import __version__

if TYPE_CHECKING:
    from llmc.artifacts.oci.reference import Reference
    from llmc.deploy.facts import BundleFacts


def render(template: str, values: Mapping[str, Any]) -> str:
    """Render `TEMPLATE.j2` of templates/ or llmc/integrations/. Its syntax: `[[ value | filter ]]`, `[% statement %]`,
    `[# comment #]`.

    The delimiters occur in none of the target languages; GitHub and Helm use `{{ }}` themselves. A value without a
    filter of quoting.py is an error, so that nothing is written unquoted; only whole numbers need no filter.
    """
    return _environment().get_template(f"{template}.j2").render(values)


@cache
def _environment() -> Environment:
    built = Environment(
        loader=ChoiceLoader([PackageLoader("llmc.deploy"), PackageLoader("llmc", "integrations")]),
        undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True,
        autoescape=False,  # noqa: S701 - _finished enforces quoting for these languages
        lstrip_blocks=True, finalize=_finished, block_start_string="[%", block_end_string="%]",
        variable_start_string="[[", variable_end_string="]]", comment_start_string="[#", comment_end_string="#]",
    )  # fmt: skip
    built.filters.update(FILTERS)
    return built


def _finished(value: object) -> object:
    if isinstance(value, Written) or type(value) is int:
        return value
    raise TypeError(f"a template writes {value!r:.80} without a filter")


PYTHON_IMAGE = "python:3.11-slim-bookworm"
"""Default base image, unless the device needs another one."""
USER = 10001
"""User and group id of servers: not root, and not defined in any image."""
SHUTDOWN_S = 30
"""Seconds for running requests at shutdown, the default of `llmc serve`."""


@dataclass(frozen=True)
class Options:
    """Options of a deployment; "" means not given.

    `bundle_image` is where nodes get the bundle. `image` runs llmc and is built on `base_image`. `model` is the
    checkpoint that CI compiles. `server` is another server, `configuration` its plan, `device` its device,
    `cache_image` its packed compile cache, and `tool_image` has the llmc that unpacks it. `trusted_keys` is a
    ConfigMap, `api_key_secret` a Secret, and `allow_from` are namespaces.
    """

    name: str = ""
    bundle: BundleFacts | None = None
    bundle_path: str = ""
    bundle_image: Reference | None = None
    image: str = ""
    base_image: str = ""
    model: str = ""
    traffic: str = ""
    max_padding: str = ""
    runner: str = ""
    namespace: str = ""
    replicas: int = 1
    max_replicas: int = 4
    port: int = 8000
    cpus: int = 4
    pull: bool = False
    trusted_keys: str = ""
    api_key_secret: str = ""
    allow_from: tuple[str, ...] = ()
    program: str = "/opt/llmc/bin/llmc"
    device: str = ""
    server: str = ""
    configuration: Path | None = None
    cache_image: Reference | None = None
    tool_image: str = ""

    @property
    def facts(self) -> BundleFacts:
        """Facts about the bundle, which must be given."""
        assert self.bundle is not None
        return self.bundle

    @property
    def label(self) -> str:
        """The name of all resources."""
        return self.name or (label(self.model) if self.bundle is None else self.bundle.label)

    @property
    def extras(self) -> str:
        """llmc's extras that serve the bundle and check its signature."""
        return ",".join(filter(None, ("serve", "sign", self.facts.hosting.extra)))

    @property
    def compile_extras(self) -> str:
        """llmc's extras that compile the bundle again."""
        return ",".join(dict.fromkeys(filter(None, ("compile", self.facts.hosting.extra))))


class DeploymentKind(ABC):
    """One kind of deployment, as files rendered from templates."""

    name: ClassVar[str]
    takes: ClassVar[tuple[str, ...]] = ()
    """Options that apply to it, besides `name`."""

    needs: ClassVar[tuple[str, ...]] = ("bundle",)
    """Required options."""

    templates: ClassVar[Mapping[str, str]] = {}
    """Path → template name; `{name}` in a path is the deployment's name."""

    def files(self, options: Options) -> Mapping[str, str]:
        """Render the texts by path. Raises InputError for options that cannot be written."""
        values = {"options": options, "version": __version__, "user": USER, **self.values(options)}
        return {path.format(name=options.label): render(name, values) for path, name in self.templates.items()}

    def values(self, options: Options) -> dict[str, Any]:
        """Template variables besides `options`, `version` and `user`. Raises InputError."""
        return {"facts": options.facts, "hosting": options.facts.hosting, "shutdown": SHUTDOWN_S}


def flag_of(name: str) -> str:
    """The flag of an option, such as "--bundle-image" for "bundle_image"."""
    return f"--{name.replace('_', '-')}"


def base_image(options: Options) -> str:
    """The base image. Raises InputError if the device needs software that no package provides."""
    needed = options.facts.hosting.own_image
    if options.base_image or not needed:
        return options.base_image or PYTHON_IMAGE
    raise InputError(
        f"{options.facts.manifest.device} needs an image with {needed} and Python 3.11; name it with --base-image"
    )


LABELS = ("name", "namespace", "trusted_keys", "api_key_secret")
IMAGES = ("image", "base_image", "tool_image")
REFERENCES = ("bundle_image", "cache_image")
FLAGS = {"pull": "--bundle-volume pull"}
"""Flags whose names differ from their options."""


def options_for(kind: DeploymentKind, given: Mapping[str, Any]) -> Options:
    """The options of a kind; `given` by name, None or () if not given. Raises InputError for unusable ones."""
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
    """Write texts by path below `folder`; files with the same content are left alone.

    Raises InputError, before anything is written, for a file with other content without `force`.
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
