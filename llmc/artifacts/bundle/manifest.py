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
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.artifacts.bundle.manifest_schema import (
    CHECKSUM_NAME,
    FILE_NAME,
    KIND,
    MAX_BYTES,
    SCHEMA,
    Check,
    Executable,
    checksum_line,
)
from llmc.artifacts.digest import digest_bytes, open_regular
from llmc.artifacts.key import Value, canonical_json
from llmc.errors import ArtifactError
from llmc.paths import is_dir
from llmc.strict_json import AmbiguousError, loads

MAX_CHECKSUM_BYTES = 256
ATTEMPTS = 5


class Manifest:
    """A validated manifest. Treat the values of its attributes as read-only.

    `source` names the file in errors. Raises ArtifactError naming `source` and the invalid member.
    """

    __slots__ = ("_data", "blobs", "executables", "files", "source")

    def __init__(self, data: Mapping[str, Any], source: str | Path = FILE_NAME) -> None:
        check = Check(str(source))
        self.source = str(source)
        self._data = check.document(data)
        self.blobs: Mapping[str, int] = check.blobs(data)
        self.files: Mapping[str, str] = check.files(data, self.blobs)
        self.executables: tuple[Executable, ...] = check.executables(data, self.blobs)

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
        check = Check(str(source))
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
    def llmc(self) -> str:
        """The version of llmc that wrote the manifest."""
        return str(self._data["llmc"])

    @property
    def device(self) -> str:
        """The --device that the bundle was compiled for."""
        return str(self._data["device"])

    @property
    def target(self) -> str:
        """Name of the compiler target."""
        return str(self._data["target"])

    @property
    def executor(self) -> str:
        """Name of the runtime executor that loads the executables."""
        return str(self._data["executor"])

    @property
    def model(self) -> Mapping[str, Any]:
        """The checkpoint's name, architecture and sizes."""
        return self._object("model")

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the target."""
        return self._object("options")

    @property
    def plan(self) -> Mapping[str, Any]:
        """The bucket plan as JSON."""
        return self._object("plan")

    @property
    def toolchain(self) -> Mapping[str, str]:
        """Names and versions of the compilers used."""
        return self._object("toolchain")

    @property
    def isa(self) -> tuple[str, ...]:
        """Instruction sets or chip that native code requires; empty if it requires none in particular."""
        isa = self._data.get("isa", [])
        return (isa,) if isinstance(isa, str) else tuple(isa)

    @property
    def verification(self) -> Mapping[str, Any]:
        """How the executables compared with the reference model."""
        return self._object("verification")

    @property
    def provenance(self) -> Mapping[str, Any]:
        """How the bundle was built."""
        return self._object("provenance")

    @property
    def summary(self) -> Mapping[str, Any]:
        """Counts, sizes and times for display."""
        return self._object("summary")

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

    def _object(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._data.get(name, {})
        return found


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
