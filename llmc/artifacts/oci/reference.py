"""Image names: `oci://host[:port]/name[:tag|@digest]` and `oci-layout:folder[:tag|@digest]`.

    name = part ("/" part)*        part, tag and digest: OCI distribution-spec 1.1, "Pulling manifests"

Without a tag, registries use `latest`; a layout's only image is pulled whatever its tag. Registries on this machine
(localhost, 127.*, [::1]) use plain HTTP, others HTTPS.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.digest import is_digest
from llmc.errors import InputError

REGISTRY = "oci://"
LAYOUT = "oci-layout:"
LATEST = "latest"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_LOOPBACK = re.compile(r"(?:localhost|127(?:\.[0-9]{1,3}){3}|\[::1\])(?::[0-9]+)?")
_LONGEST_NAME = 255


class Reference(NamedTuple):
    """A parsed image name: in a registry (`host` and `name`) or in a layout (`folder`)."""

    host: str | None
    name: str
    folder: Path | None
    tag: str | None
    digest: str | None

    def __str__(self) -> str:
        location = f"{LAYOUT}{self.folder}" if self.folder is not None else f"{REGISTRY}{self.host}/{self.name}"
        return f"{location}@{self.digest}" if self.digest else f"{location}:{self.tag}" if self.tag else location

    @property
    def plain_http(self) -> bool:
        """Whether the registry is on this machine."""
        return self.host is not None and is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host, with or without a port, is this machine by name or address."""
    return _LOOPBACK.fullmatch(host) is not None


def is_reference(text: str) -> bool:
    """Whether a URL names an image, in a registry or in a layout."""
    return text.startswith((REGISTRY, LAYOUT))


def parse_reference(text: str) -> Reference:
    """Parse an image name. Raises InputError, which never repeats credentials."""
    if text.startswith(LAYOUT):
        path, tag, digest = _version(text.removeprefix(LAYOUT))
        if not path or "\0" in path:
            raise InputError(f"{text!r:.200}: a folder is missing, as in oci-layout:images:v1")
        return Reference(None, "", Path(path), tag, digest)
    if not text.startswith(REGISTRY):
        raise InputError(f"{text!r:.200} is not an image name: oci://host/name:tag or oci-layout:folder:tag")
    host, _, rest = text.removeprefix(REGISTRY).partition("/")
    name, tag, digest = _version(rest)
    if "@" in host + name:
        raise InputError(
            "a registry's name must not contain credentials; use `docker login`, and remove the part before the @"
        )
    if not _HOST.fullmatch(host) or not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise InputError(f"{text!r:.200} is not an image name: oci://host[:port]/name[:tag|@sha256:…]")
    return Reference(host, name, None, tag, digest)


def _version(text: str) -> tuple[str, str | None, str | None]:
    location, at, digest = text.rpartition("@")
    if at and is_digest(digest):
        before, colon, tag = location.rpartition(":")
        return (before if colon and _TAG.fullmatch(tag) else location), None, digest
    location, colon, tag = text.rpartition(":")
    return (location, tag, None) if colon and _TAG.fullmatch(tag) else (text, None, None)
