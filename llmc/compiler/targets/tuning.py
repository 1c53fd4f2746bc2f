"""The contract of tuning: a device's compiler times matmul kernels on the device's host, for compiles on any host.

A target whose compiler supports this has a `Tuner` (`Target.tuner`). pipeline/tune.py tunes a bundle's executables one
by one, and keeps the results in the store and in a file. Keys and results are the compiler's own; only the target reads
them.

A file of results is canonical JSON, small enough to be read, compared and kept with a plan.

    file     = {"digest": sha256 of the canonical JSON of file without it, "format": "llmc tuning results",
                "built_for": {name: text, …}, "results": {key: result, …}, "version": 1}
    key      = text of the compiler, at most MAX_KEY characters
    result   = base64 of the compiler's bytes

Security. A file may come from anywhere: reading one runs nothing, is bounded by MAX_BYTES before it is parsed, and
raises only ArtifactError. The compiler parses each result again. Executables built with results are checked against the
reference only on a host with the device.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from llmc.artifacts.digest import digest_bytes, open_regular
from llmc.artifacts.key import canonical_json
from llmc.errors import ArtifactError, InputError
from llmc.strict_json import loads_object

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.runtime.bundle import Bundle

STAGE = "tuning"
"""Kind of the store entries that hold results. Their key is the digest of the file, `results`."""

RESULTS = "results.json"
"""The output of such an entry."""


@dataclass(frozen=True)
class Results:
    """`found` maps the compiler's keys to its results; `built_for` names what they hold for: GPU, compiler …"""

    built_for: Mapping[str, str]
    found: Mapping[str, bytes] = field(default_factory=dict)

    def merged(self, newer: Results) -> Results:
        """Add the results of `newer`, which win. Raises ArtifactError for another GPU or compiler, naming the
        differences.
        """
        names = sorted(self.built_for.keys() | newer.built_for.keys())
        mine, theirs = self.built_for, newer.built_for
        differ = [
            f"{n} {mine.get(n, 'none')}, not {theirs.get(n, 'none')}" for n in names if mine.get(n) != theirs.get(n)
        ]
        if differ:
            raise ArtifactError(
                f"these results cannot be merged: one is of {'; of '.join(differ)}; keep a file for each"
            )
        return Results(self.built_for, {**self.found, **newer.found})


class Tuner(ABC):
    """Tunes kernels on the device's host."""

    @abstractmethod
    def lacks(self) -> str:
        """Describe what this host lacks to tune, with the install line or where to go; "" if nothing."""

    @abstractmethod
    def tune(self, bundle: Bundle, executable: Executable, known: Results | None) -> Results | None:
        """Return `known` with results for matmuls of one executable of `bundle` that are not in it; None for none at
        all.

        Raises CompileError with the compiler's words, DeviceError, and ArtifactError where `known` is of another GPU or
        compiler.
        """


FORMAT = "llmc tuning results"
VERSION = 1
MAX_BYTES = 64 << 20
MAX_KEY = 1 << 20
_MEMBERS = {"digest", "format", "built_for", "results", "version"}


def write_results(results: Results) -> bytes:
    """Serialise results; equal results give equal bytes."""
    body: dict[str, Any] = {
        "format": FORMAT, "version": VERSION, "built_for": dict(results.built_for),
        "results": {key: base64.b64encode(value).decode() for key, value in results.found.items()},
    }  # fmt: skip
    return canonical_json({**body, "digest": digest_bytes(canonical_json(body))})


def read_results(path: Path) -> Results:
    """Read a file. Raises InputError where it cannot be read, ArtifactError for invalid content; both name it."""
    return parse_results(read_bytes(path), str(path))


def read_bytes(path: Path) -> bytes:
    """Read the file `path` up to the size limit. Raises InputError that names it."""
    try:
        with open_regular(path) as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; name a file that llmc tune wrote") from error


def parse_results(data: bytes, source: str) -> Results:
    """Parse a file's bytes; `source` names it in errors. Raises only ArtifactError."""
    if len(data) > MAX_BYTES:
        _fail(source, f"larger than {MAX_BYTES >> 20} MiB")
    try:
        members = loads_object(data)
    except ValueError as error:
        _fail(source, f"damaged, or not results of llmc tune ({error!s:.80})", error)
    if members.get("format") != FORMAT:
        _fail(source, "not results of llmc tune")
    version = members.get("version")
    if type(version) is not int or version != VERSION:
        _fail(source, f"version {version!r:.20} of the format, where this llmc reads version {VERSION}")
    body = {name: value for name, value in members.items() if name != "digest"}
    try:
        intact = set(members) == _MEMBERS and members["digest"] == digest_bytes(canonical_json(body))
    except ValueError:  # an unpaired surrogate, which JSON can hold and UTF-8 cannot
        intact = False
    if not intact:
        _fail(source, "damaged: it is not what was written")
    built_for, found = members["built_for"], members["results"]
    if not _is_texts(built_for) or not _is_texts(found):
        _fail(source, "'built_for' and 'results' must be {text: text}")
    if any(len(key) > MAX_KEY for key in found):
        _fail(source, f"a key of more than {MAX_KEY} characters")
    try:
        return Results(built_for, {key: base64.b64decode(value, validate=True) for key, value in found.items()})
    except ValueError as error:
        _fail(source, f"a result is not base64 ({error})", error)


def _is_texts(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(value, str) for value in found.values())


def _fail(source: str, problem: str, cause: Exception | None = None) -> NoReturn:
    raise ArtifactError(f"{source}: {problem}; create it again with llmc tune") from cause
