"""Certificate files: format, reading and writing.

    file = {"certificate": members of Certificate, "signature": a signature file (signing/envelope.py) | null}

A signature covers `content`: the certificate's members in one canonical encoding, whatever the layout of the file.
Certificates are untrusted input, so reading raises only ArtifactError. checking.py decides whether to trust one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from llmc.artifacts.atomic_write import write_atomic, writing
from llmc.artifacts.digest import open_regular
from llmc.artifacts.key import canonical_json
from llmc.artifacts.signing.envelope import CERTIFICATE as KIND
from llmc.errors import ArtifactError, InputError
from llmc.json_fields import Fields
from llmc.runtime.certificate.monitors import Account
from llmc.strict_json import loads_object

if TYPE_CHECKING:
    from llmc.artifacts.signing.signer import Signer

SCHEMA = 3
MAX_BYTES = 16 << 20
MAX_NAMES = 100
"""Names per monitor that a certificate keeps; the counts include all."""
MAX_COUNT = 1 << 50

T = TypeVar("T")


@dataclass(frozen=True)
class Used:
    """An executable of the bundle: runs in the replay, and steps in requests."""

    name: str
    key: str
    state: str
    blob: str
    replays: int
    steps: int


@dataclass(frozen=True)
class BucketUsed:
    """A bucket of the plan, with the same counts as Used."""

    phase: str
    batch: int
    query: int
    context: int
    replays: int
    steps: int


@dataclass(frozen=True)
class Requests:
    """The random requests of the run, in tokens.

    `kinds` counts requests by kind of sampling and `refused` gives the reason for each kind that the bundle refuses;
    `finished` counts choices by finish reason.
    """

    count: int
    seed: int
    finished: Mapping[str, int]
    kinds: Mapping[str, int]
    refused: Mapping[str, str]
    prompt_tokens: int
    longest_prompt: int
    answer_tokens: int
    most_at_once: int
    from_prefixes: int


@dataclass(frozen=True)
class CertifiedHost:
    """The host of the run. `features` are the instruction sets that kernel selection depends on."""

    system: str
    machine: str
    features: tuple[str, ...]
    cpus: int
    threads: int
    memory: int | None


@dataclass(frozen=True)
class Certificate:
    """A certificate.

    `bundle` and `verification` are digests of the manifest and of its verification outcome. `created` is in UTC. With
    `any_shape`, the executables take any shape, so plan buckets are not their shapes. `graphs`: buckets with a captured
    graph, None on a device that captures none. `accelerator`: ExecutorDescription.host for the device, driver and
    compiler, empty on a CPU. `seconds` are by stage.
    """

    llmc: str
    created: str
    bundle: str
    device: str
    executor: str
    plan: Mapping[str, Any]
    verification: str | None
    any_shape: bool
    graphs: int | None
    executables: tuple[Used, ...]
    buckets: tuple[BucketUsed, ...]
    monitors: tuple[Account, ...]
    requests: Requests
    host: CertifiedHost
    accelerator: Mapping[str, str]
    toolchain: Mapping[str, str]
    seconds: Mapping[str, float]

    @property
    def compilations(self) -> int:
        """Compilations seen after the bundle was ready."""
        return sum(account.after or 0 for account in self.monitors)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        members = json.loads(json.dumps(asdict(self)))
        members["monitors"] = [_account(account) for account in self.monitors]
        return {"kind": KIND, "schema": SCHEMA, "compilations": self.compilations, **members}


def content(members: Mapping[str, Any]) -> bytes:
    """Return the bytes that a signature covers."""
    return canonical_json(members)


def to_file(members: Mapping[str, Any], signature: bytes | None) -> bytes:
    """Return the bytes of a certificate file."""
    signed = None if signature is None else json.loads(signature)
    text = json.dumps({"certificate": members, "signature": signed}, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def write_file(file: Path, built: Certificate, signer: Signer | None) -> None:
    """Write a certificate atomically. Raises CapacityError or UnwritableError."""
    members = built.to_dict()
    data = to_file(members, None if signer is None else signer.sign(content(members)))
    with writing(file, len(data), "name another file"):
        write_atomic(file, data, file.parent)


def read_file(path: str | Path) -> tuple[Certificate, bytes, bytes | None]:
    """Read a certificate, the bytes that its signature covers, and the signature.

    Raises ArtifactError that names the file.
    """
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ArtifactError(f"{path}: the certificate cannot be read ({error.strerror})") from error
    if len(data) > MAX_BYTES:
        _fail(path, f"larger than {MAX_BYTES} bytes")
    try:
        document = loads_object(data)
    except ValueError as error:
        _fail(path, f"not valid JSON ({error})", error)
    if set(document) != {"certificate", "signature"}:
        _fail(path, "not an object of 'certificate' and 'signature'")
    signature = document["signature"]
    if signature is not None and not isinstance(signature, dict):
        _fail(path, "its signature is not an object")
    try:
        built = _parsed(Fields(document["certificate"], str(path)))
        return built, content(document["certificate"]), None if signature is None else canonical_json(signature)
    except (InputError, ValueError) as error:
        _fail(path, str(error).removeprefix(f"{path}: "), error)


def _fail(path: str | Path, problem: str, cause: BaseException | None = None) -> NoReturn:
    raise ArtifactError(f"{path}: not a certificate: {problem}; make one with `llmc warmup --certify`") from cause


def _parsed(given: Fields) -> Certificate:
    if given.text("kind") != KIND:
        raise ValueError(f"its kind is not {KIND}")
    if (schema := given.integer("schema")) != SCHEMA:
        raise ValueError(f"schema {schema}, and this llmc reads schema {SCHEMA}")
    compilations = _count(given, "compilations")
    built = Certificate(
        llmc=given.text("llmc"),
        created=given.text("created"),
        bundle=given.text("bundle"),
        device=given.text("device"),
        executor=given.text("executor"),
        plan=given.nested("plan").rest(),
        verification=_optional(given, "verification", given.text),
        any_shape=_boolean(given, "any_shape"),
        graphs=_READERS["int | None"](given, "graphs"),
        executables=tuple(_members(Used, one) for one in _objects(given, "executables")),
        buckets=tuple(_members(BucketUsed, one) for one in _objects(given, "buckets")),
        monitors=tuple(_account_of(one) for one in _objects(given, "monitors")),
        requests=_members(Requests, given.nested("requests")),
        host=_members(CertifiedHost, given.nested("host")),
        accelerator=_map(given.nested("accelerator"), Fields.text),
        toolchain=_map(given.nested("toolchain"), Fields.text),
        seconds=_map(given.nested("seconds"), Fields.number),
    )
    given.finish()
    if built.compilations != compilations:
        raise ValueError(f"it says {compilations} compilations, its monitors {built.compilations}")
    return built


def _members(cls: type[T], given: Fields) -> T:
    """Read a flat dataclass; its annotations select the reader of each field."""
    values = {one.name: _READERS[str(one.type)](given, one.name) for one in fields(cls)}  # type: ignore[arg-type]
    given.finish()
    return cls(**values)


def _count(given: Fields, name: str) -> int:
    value = given.integer(name)
    if not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{given.path(name)} is {value}")
    return value


def _optional(given: Fields, name: str, read: Any) -> Any:
    return None if given.peek(name) is None else read(name)


def _boolean(given: Fields, name: str) -> bool:
    value = given.peek(name)
    if not isinstance(value, bool):
        raise ValueError(f"{given.path(name)} is neither true nor false")
    return value


def _objects(given: Fields, name: str) -> list[Fields]:
    return [Fields(one, given.document, f"{given.path(name)}[{i}]") for i, one in enumerate(given.array(name))]


def _texts(given: Fields, name: str) -> tuple[str, ...]:
    found = given.array(name)
    if not all(isinstance(one, str) for one in found):
        raise ValueError(f"{given.path(name)} holds something else than texts")
    return tuple(str(one) for one in found)


def _map(given: Fields, read: Any) -> dict[str, Any]:
    return {name: read(given, name) for name in given.names()}


_READERS: Mapping[str, Any] = {
    "str": Fields.text,
    "int": _count,
    "int | None": lambda given, name: _optional(given, name, lambda name: _count(given, name)),
    "bool": _boolean,
    "tuple[str, ...]": _texts,
    "Mapping[str, int]": lambda given, name: _map(given.nested(name), _count),
    "Mapping[str, str]": lambda given, name: _map(given.nested(name), Fields.text),
}


def _account(account: Account) -> dict[str, Any]:
    return {
        "monitor": account.monitor,
        "before": {"count": account.before, "names": list(account.names_before[:MAX_NAMES])},
        "after": {"count": account.after, "names": list(account.names_after[:MAX_NAMES])},
        "blind": account.blind,
    }


def _account_of(given: Fields) -> Account:
    before, after = given.nested("before"), given.nested("after")
    counts = [_optional(of, "count", lambda name, of=of: _count(of, name)) for of in (before, after)]
    names = [_texts(of, "names") for of in (before, after)]
    built = Account(given.text("monitor"), counts[0], counts[1], names[0], names[1], given.text("blind"))
    for one in (before, after, given):
        one.finish()
    return built
