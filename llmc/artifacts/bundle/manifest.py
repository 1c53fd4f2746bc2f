"""The manifest of a bundle: what was compiled, for what, and which blobs it consists of.

    <bundle>/manifest.json = {
        "schema": 1, "kind": "llmc-bundle", "llmc": version,
        "model": {…}, "device": str, "target": str, "executor": str, "options": {…}, "plan": {…},
        "executables": [{"phase": str, "batch": int | null, "query": int | null, "context": int | null,
                         "state": "portable" | "native", "blob": digest, "buckets": int, "key": digest}, …],
        "files": {name: digest}, "blobs": {digest: size in bytes},
        "toolchain": {name: version}, "isa": str | [str, …],
        "verification": {…}, "provenance": {…}, "summary": {…}}

Required: schema, kind, llmc, device, target, executor, executables, files and blobs. Other members default to empty.
Unknown members are kept. Every digest in "executables" and "files" must be listed in "blobs". Manifests are untrusted:
reading one raises only ArtifactError, and no name in it can leave the bundle.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from llmc.artifacts.digest import digest_bytes, is_digest, open_regular, parse
from llmc.artifacts.key import Value, canonical_json
from llmc.errors import ArtifactError
from llmc.paths import is_dir
from llmc.strict_json import AmbiguousError, loads

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


class _Check:
    """Checks for one manifest. Each returns the checked value or raises ArtifactError naming file and member."""

    def __init__(self, source: str) -> None:
        self.source = source

    def fail(self, problem: str) -> NoReturn:
        raise ArtifactError(f"{self.source}: {problem}; compile the bundle again with `llmc compile`")

    def document(self, data: Mapping[str, Any]) -> dict[str, Any]:
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
        blobs = self.mapping(data, "blobs")
        for digest, size in blobs.items():
            if not is_digest(digest):
                self.fail(f"blobs[{digest!r:.100}] is not named by a digest (sha256:<64 hex digits>)")
            self.integer(size, f"blobs[{digest!r}]", MAX_BLOB_BYTES)
        return dict(blobs)

    def files(self, data: Mapping[str, Any], blobs: Mapping[str, int]) -> Mapping[str, str]:
        files = self.mapping(data, "files")
        for name, digest in files.items():
            if not isinstance(name, str) or not _FILE.fullmatch(name):
                self.fail(f"files[{name!r:.100}] is not a plain file name")
            self.blob(digest, f"files[{name!r}]", blobs)
        return dict(files)

    def executables(self, data: Mapping[str, Any], blobs: Mapping[str, int]) -> tuple[Executable, ...]:
        items = data.get("executables")
        if not isinstance(items, list):
            self.fail("'executables' must be a list")
        return tuple(self.executable(item, f"executables[{at}]", blobs) for at, item in enumerate(items))

    def executable(self, item: object, where: str, blobs: Mapping[str, int]) -> Executable:
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
        found = data.get(name)
        if not isinstance(found, Mapping):
            self.fail(f"{name!r} must be an object")
        return found

    def integer(self, value: object, where: str, largest: int) -> None:
        if type(value) is not int or not 0 <= value <= largest:
            self.fail(f"{where} must be an integer from 0 to {largest}")

    def blob(self, digest: object, where: str, blobs: Mapping[str, int]) -> None:
        if not is_digest(digest):
            self.fail(f"{where} is not a digest (sha256:<64 hex digits>)")
        if digest not in blobs:
            self.fail(f"{where} names {digest}, which is not in 'blobs'")


MAX_CHECKSUM_BYTES = 256
ATTEMPTS = 5


class Manifest:
    """A validated manifest; its attributes are the members of the format. Treat their values as read-only.

    `source` names the file in errors. `llmc` is the version that wrote the manifest, `device` the --device that the
    bundle was compiled for, `target` the compiler target, and `executor` the runtime executor that loads the
    executables. `isa` lists the instruction sets or the chip that native code requires; empty if it requires none in
    particular. Raises ArtifactError naming `source` and the invalid member.
    """

    __slots__ = (
        "_data", "blobs", "device", "executables", "executor", "files", "isa", "llmc", "model", "options", "plan",
        "provenance", "source", "summary", "target", "toolchain", "verification",
    )  # fmt: skip

    def __init__(self, data: Mapping[str, Any], source: str | Path = FILE_NAME) -> None:
        check = _Check(str(source))
        self.source = str(source)
        self._data = check.document(data)
        self.blobs: Mapping[str, int] = check.blobs(data)
        self.files: Mapping[str, str] = check.files(data, self.blobs)
        self.executables: tuple[Executable, ...] = check.executables(data, self.blobs)
        self.llmc: str = data["llmc"]
        self.device: str = data["device"]
        self.target: str = data["target"]
        self.executor: str = data["executor"]
        self.model: Mapping[str, Any] = data.get("model", {})
        self.options: Mapping[str, Any] = data.get("options", {})
        self.plan: Mapping[str, Any] = data.get("plan", {})
        self.toolchain: Mapping[str, str] = data.get("toolchain", {})
        self.verification: Mapping[str, Any] = data.get("verification", {})
        self.provenance: Mapping[str, Any] = data.get("provenance", {})
        self.summary: Mapping[str, Any] = data.get("summary", {})
        isa = data.get("isa", [])
        self.isa: tuple[str, ...] = (isa,) if isinstance(isa, str) else tuple(isa)

    @classmethod
    def create(cls, *, llmc: str, device: str, target: str, executor: str, **members: Any) -> Manifest:
        """Create a manifest; `members`, the other members of the format, are copied. Raises ArtifactError."""
        try:
            members = json.loads(json.dumps(members, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ArtifactError(f"a manifest can hold only JSON values ({error})") from error
        fixed = {"schema": SCHEMA, "kind": KIND, "llmc": llmc}
        lists: dict[str, Any] = {"executables": [], "files": {}, "blobs": {}}
        return cls({**fixed, **lists, "device": device, "target": target, "executor": executor, **members})

    @classmethod
    def from_bytes(cls, data: bytes, source: str | Path = FILE_NAME) -> Manifest:
        """Parse and validate a manifest file. Raises only ArtifactError."""
        check = _Check(str(source))
        if len(data) > MAX_BYTES:
            check.fail(f"larger than {MAX_BYTES} bytes")
        try:
            document = loads(data)
        except AmbiguousError as error:
            check.fail(str(error))
        except ValueError as error:
            check.fail(f"not valid JSON ({error})")
        if not isinstance(document, dict):
            check.fail("not a JSON object")
        return cls(document, source)

    def to_bytes(self) -> bytes:
        """Return the file content; equal members give equal bytes."""
        return json.dumps(self._data, sort_keys=True, indent=1, allow_nan=False).encode() + b"\n"

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all members."""
        copy: dict[str, Any] = json.loads(self.to_bytes())
        return copy

    def changed(self, **members: Any) -> Manifest:
        """Return a copy with `members` replaced, in the current schema. Raises ArtifactError."""
        kept = {name: value for name, value in self.to_dict().items() if name not in ("schema", "kind")}
        return Manifest.create(**kept | members)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __repr__(self) -> str:
        return f"Manifest({self.source!r}, {self.device}, {len(self.executables)} executables)"

    @property
    def digest(self) -> str:
        """Digest of the file content, which identifies the bundle."""
        return digest_bytes(self.to_bytes())

    @property
    def size(self) -> int:
        """Total bytes of all blobs."""
        return sum(self.blobs.values())

    @property
    def is_unbound(self) -> bool:
        """Whether the bundle was compiled from a configuration without weights, and still needs them."""
        return "tensors.json" in self.files and "weights" not in self.files

    def use_of(self, digest: str) -> str:
        """Describe what a blob is used for: the names of its files and executables."""
        uses = [name for name, found in self.files.items() if found == digest]
        uses += [f"executable {item}" for item in self.executables if item.blob == digest]
        return ", ".join(uses) or "listed under blobs"


def read_manifest(path: str | Path) -> Manifest:
    """Read the manifest of a bundle folder, or a manifest file.

    The checksum file may be absent. Raises ArtifactError, naming file and member, for an unreadable or invalid manifest
    and for one that does not match its checksum.
    """
    given = Path(path)
    try:
        file = given / FILE_NAME if is_dir(given) else given
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactError(f"{file}: not a bundle (a regular file is needed)")
        for _ in range(ATTEMPTS):  # the bundle may be replaced between the two reads
            with file.open("rb") as stream:
                data = stream.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                break  # report the size, and not the checksum, which covers the whole file
            if _checksum(file.parent / CHECKSUM_NAME) in (None, checksum_line(digest_bytes(data))):
                break
        else:
            raise ArtifactError(
                f"{file}: was altered, or its checksum in {CHECKSUM_NAME} was; compile the bundle again with "
                "`llmc compile`"
            )
    except FileNotFoundError as error:
        reason = f"no {FILE_NAME} in it" if is_dir(given) else "no such file or folder"
        raise ArtifactError(f"{given}: not a bundle ({reason}); make one with `llmc compile`") from error
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{given}: the bundle cannot be read ({error})") from error
    return Manifest.from_bytes(data, file)


def _checksum(file: Path) -> bytes | None:
    try:
        with open_regular(file) as stream:
            return stream.read(MAX_CHECKSUM_BYTES)
    except FileNotFoundError:
        return None


LONGEST_LIST = 200


def manifest_components(manifest: Manifest) -> dict[str, Value]:
    """Return the members that decide a bundle's behavior, by dotted name, without its provenance and verification.

    A long list (a plan's buckets) is represented by its digest, an executable, named by phase and shape, by its key.
    """
    found: dict[str, Value] = {
        "llmc": manifest.llmc,
        "device": manifest.device,
        "target": manifest.target,
        "executor": manifest.executor,
        "isa": " ".join(manifest.isa),
    }
    for name in ("model", "options", "plan", "toolchain"):
        _flatten(name, getattr(manifest, name), found)
    for name, digest in manifest.files.items():
        found[f"files.{name}"] = digest
    for item in manifest.executables:
        found[f"executable[{item}]"] = item.key
        found[f"executable[{item}].state"] = item.state
    return found


def flat_components(members: Mapping[str, Any]) -> dict[str, Value]:
    """Return some members of a manifest under the names that `manifest_components` uses."""
    found: dict[str, Value] = {}
    for name, value in members.items():
        _flatten(name, value, found)
    return found


def _flatten(name: str, value: Any, found: dict[str, Value]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(f"{name}.{key}", inner, found)
    elif value is None or isinstance(value, str | bool | int):
        found[name] = value
    else:
        text = canonical_json(value)
        found[name] = text.decode() if len(text) <= LONGEST_LIST else digest_bytes(text)
