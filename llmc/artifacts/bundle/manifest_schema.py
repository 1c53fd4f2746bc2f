"""Limits and checks for manifests. manifest.py describes the format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from llmc.artifacts.digest import is_digest, parse
from llmc.errors import ArtifactError

SCHEMA = 1
KIND = "llmc-bundle"
FILE_NAME = "manifest.json"
STARTER_NAME = "starter.json"
"""Bundle file: the manifest of a second bundle over the same blobs (executors/openvino/starting.py)."""

PORTABLE_NAME = "portable.json"
"""File of a bundle compiled on the target: the manifest of its portable source, over the same blobs."""

BUILT_FOR = "built_for"
"""Option of a bundle compiled on the target: what its executables are tied to, by name (GPU, driver, compiler)."""

CHECKSUM_NAME = "manifest.sha256"
SIGNATURE_NAME = "signature.json"
MAX_BYTES = 64 << 20
MAX_BLOB_BYTES = 1 << 50
MAX_DIMENSION = 1 << 40
STATES = ("portable", "native")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
_OBJECTS = ("model", "options", "plan", "toolchain", "verification", "provenance", "summary")
_STRINGS = ("llmc", "device", "target", "executor")


def checksum_line(digest: str) -> bytes:
    """Return the content of "manifest.sha256" for a manifest digest: one line that `sha256sum -c` reads."""
    return f"{parse(digest)}  {FILE_NAME}\n".encode()


class Executable(NamedTuple):
    """One compiled graph. A dimension of None is dynamic. `buckets` counts the buckets it serves."""

    phase: str
    batch: int | None
    query: int | None
    context: int | None
    state: str
    blob: str
    buckets: int
    key: str

    def __str__(self) -> str:
        sizes = ((name, getattr(self, name)) for name in ("batch", "query", "context"))
        return " ".join([self.phase, *(f"{name}={size}" for name, size in sizes if size is not None)])


class Check:
    """Checks for one manifest. Each returns the checked value or raises ArtifactError naming file and member."""

    def __init__(self, source: str) -> None:
        self.source = source

    def fail(self, problem: str) -> NoReturn:
        """Raise ArtifactError about this file."""
        raise ArtifactError(f"{self.source}: {problem}; compile the bundle again with `llmc compile`")

    def document(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Check the members other than blobs, files and executables."""
        if data.get("kind") != KIND:
            self.fail(f'not a manifest of a bundle ("kind" is not {KIND!r})')
        self.schema(data.get("schema"))
        for name in _STRINGS:
            if not isinstance(data.get(name), str):
                self.fail(f"{name!r} must be a string")
        for name in _OBJECTS:
            if not isinstance(data.get(name, {}), Mapping):
                self.fail(f"{name!r} must be an object")
        for name, version in data.get("toolchain", {}).items():
            if not isinstance(version, str):
                self.fail(f"toolchain[{name!r:.80}] must be a string")
        isa = data.get("isa", [])
        if not isinstance(isa, str) and not (isinstance(isa, list) and all(isinstance(x, str) for x in isa)):
            self.fail("'isa' must be a string or a list of strings")
        try:
            json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            self.fail(f"cannot be written as JSON ({error})")
        return dict(data)

    def schema(self, found: object) -> None:
        """Check the version of the format."""
        if type(found) is not int:
            self.fail("'schema' must be an integer")
        if found > SCHEMA:
            raise ArtifactError(
                f"{self.source}: bundle schema {found} is newer than schema {SCHEMA}, which this llmc reads; "
                f"upgrade llmc, or compile the bundle again with this version of `llmc compile`"
            )
        if found < SCHEMA:
            self.fail(f"bundle schema {found} is older than schema {SCHEMA}, which this llmc reads")

    def blobs(self, data: Mapping[str, Any]) -> Mapping[str, int]:
        """Check digests and sizes."""
        blobs = self.mapping(data, "blobs")
        for digest, size in blobs.items():
            if not is_digest(digest):
                self.fail(f"blobs[{digest!r:.100}] is not named by a digest (sha256:<64 hex digits>)")
            self.integer(size, f"blobs[{digest!r}]", MAX_BLOB_BYTES)
        return dict(blobs)

    def files(self, data: Mapping[str, Any], blobs: Mapping[str, int]) -> Mapping[str, str]:
        """Check file names and their digests."""
        files = self.mapping(data, "files")
        for name, digest in files.items():
            if not isinstance(name, str) or not _FILE.fullmatch(name):
                self.fail(f"files[{name!r:.100}] is not a plain file name")
            self.blob(digest, f"files[{name!r}]", blobs)
        return dict(files)

    def executables(self, data: Mapping[str, Any], blobs: Mapping[str, int]) -> tuple[Executable, ...]:
        """Check the list of executables."""
        items = data.get("executables")
        if not isinstance(items, list):
            self.fail("'executables' must be a list")
        return tuple(self.executable(item, f"executables[{at}]", blobs) for at, item in enumerate(items))

    def executable(self, item: object, where: str, blobs: Mapping[str, int]) -> Executable:
        """Check one executable."""
        if not isinstance(item, Mapping):
            self.fail(f"{where} must be an object")
        phase = item.get("phase")
        if not isinstance(phase, str) or not phase:
            self.fail(f"{where}.phase must be a non-empty string")
        for name in ("batch", "query", "context"):
            if item.get(name) is not None:
                self.integer(item[name], f"{where}.{name}", MAX_DIMENSION)
        if item.get("state") not in STATES:
            self.fail(f"{where}.state must be one of {', '.join(STATES)}")
        self.integer(item.get("buckets"), f"{where}.buckets", MAX_DIMENSION)
        self.blob(item.get("blob"), f"{where}.blob", blobs)
        if not is_digest(item.get("key")):
            self.fail(f"{where}.key is not a digest (sha256:<64 hex digits>)")
        fields: dict[str, Any] = {name: item.get(name) for name in Executable._fields}
        return Executable(**fields)

    def mapping(self, data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Check that a member is an object."""
        found = data.get(name)
        if not isinstance(found, Mapping):
            self.fail(f"{name!r} must be an object")
        return found

    def integer(self, value: object, where: str, largest: int) -> None:
        """Check a size, count or dimension."""
        if type(value) is not int or not 0 <= value <= largest:
            self.fail(f"{where} must be an integer from 0 to {largest}")

    def blob(self, digest: object, where: str, blobs: Mapping[str, int]) -> None:
        """Check a reference to one of the blobs."""
        if not is_digest(digest):
            self.fail(f"{where} is not a digest (sha256:<64 hex digits>)")
        if digest not in blobs:
            self.fail(f"{where} names {digest}, which is not in 'blobs'")
