"""The file of an XLA executable: a JSON header, then sections of bytes that are used where they lie.

    file     = "LLMCXLA1" length header padding ( section padding )*     the last section has no padding behind it
    length   = size of header in bytes, uint64, little endian, at most MAX_HEADER
    header   = canonical JSON {"digest": sha256 of the canonical JSON of header without it, "version": 1,
               "sections": {name: [offset, size], …}, …} with the writer's other members
    padding  = zeros up to a multiple of 64
    section  = bytes; they follow each other in the order of their names, offset counts from the start of the file

llmc writes two sections: `native`, PJRT's own serialisation of a compiled program, and `export`, the portable program
it was compiled from (a blob of jax.export). The header's members are those of StepHeader; others are passed over:

    step     = {"platform": "cpu" | "tpu" | "cuda" | "neuron", "topology": str, "devices": int, "jax": str,
               "kind": "step" | "slots", "inputs": [tensor, …], "outputs": [tensor, …],
               "donated": [[output, input], …], …}
    tensor   = {"name": str, "shape": [int, …], "dtype": "float32" | "bfloat16" | "int32", "dims": [null | "tp", …]}

Security. A file may come from anywhere: reading one never runs, evaluates or unpickles anything, copies nothing but
the header, and raises nothing but ArtifactError. The digest is there to tell damage from a header that merely looks
odd; what vouches for the sections is the digest of the whole file, by which bundles and stores name it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from mmap import mmap
from typing import Any, NoReturn

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.errors import ArtifactError
from llmc.strict_json import loads_object

MAGIC = b"LLMCXLA1"
FORMS = {MAGIC: "an XLA executable", b"LLMCHLO1": "a Neuron program", b"LLMCNEF1": "a Neuron executable"}
"""What files of this container hold, by their first eight bytes."""

VERSION = 1
ALIGNMENT = 64
MAX_HEADER = 16 << 20
RESERVED = frozenset({"digest", "sections", "version"})
"""Members of the header that are the format's own."""

PLATFORMS = ("cpu", "tpu", "cuda", "neuron")
KINDS = ("step", "slots")
DTYPES = ("float32", "bfloat16", "int32")
AXIS = "tp"
MAX_RANK = 8
MAX_DIMENSION = 1 << 40
MAX_DEVICES = 1 << 16

_FRAME = len(MAGIC) + 8
_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}")


def write_envelope(header: Mapping[str, Any], sections: Mapping[str, bytes], magic: bytes = MAGIC) -> bytes:
    """The file of `sections`, with the members of `header`; equal arguments give equal bytes. `magic`: one of FORMS.

    Raises ValueError or TypeError for a header that JSON does not have, that is too large or has members of the format,
    and for a section whose name is not 1 to 64 of a-z 0-9 "_" "." "-", first a letter.
    """
    if taken := RESERVED & set(header):
        raise ValueError(f"{sorted(taken)} are members of the format")
    if odd := [name for name in sections if not _NAME.fullmatch(name)]:
        raise ValueError(f"{odd[0]!r:.80} is not the name of a section")
    sizes = {name: len(sections[name]) for name in sorted(sections)}
    encoded = b""
    while len(encoded) != len(encoded := _encode(header, _layout(len(encoded), sizes))):  # offsets change its length
        pass
    if len(encoded) > MAX_HEADER:
        raise ValueError(f"the header has {len(encoded)} bytes, more than {MAX_HEADER}")
    out = bytearray(magic + len(encoded).to_bytes(8, "little") + encoded)
    for name, (offset, _) in _layout(len(encoded), sizes).items():
        out += bytes(offset - len(out)) + sections[name]
    return bytes(out)


class Envelope:
    """A file that was read: `header`, the writer's members of it, and the sections. Treat the header as read-only."""

    __slots__ = ("_sections", "header", "source")

    def __init__(self, header: dict[str, Any], sections: dict[str, memoryview], source: str) -> None:
        self.header = header
        self.source = source
        self._sections = sections

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview | mmap, source: str, magic: bytes = MAGIC) -> Envelope:
        """Read and check `data`, which stays in use for the sections; `source` names it in errors, `magic` is the form
        that it should have.

        Raises ArtifactError that says what is wrong, and nothing else.
        """
        view = memoryview(data).cast("B").toreadonly()
        if bytes(view[: len(magic) - 1]) != magic[:-1]:
            _fail(source, f"not {FORMS[magic]} of llmc")
        if bytes(view[: len(magic)]) != magic:
            _newer(source, f"{bytes(view[: len(magic)])!r}", FORMS[magic])
        length = int.from_bytes(view[len(MAGIC) : _FRAME], "little")
        if length > min(MAX_HEADER, max(len(view) - _FRAME, 0)):
            _fail(source, f"damaged: a header of {length} bytes in a file of {len(view)}")
        members = _decode(bytes(view[_FRAME : _FRAME + length]), source)
        return cls(
            {name: value for name, value in members.items() if name not in RESERVED},
            _cut(view, length, members["sections"], source),
            source,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The sections' names, sorted."""
        return tuple(self._sections)

    def section(self, name: str) -> memoryview:
        """A section's bytes, read-only, where they lie in the file; raises ArtifactError when there is none."""
        if name not in self._sections:
            _fail(self.source, f"no section {name!r}; it has {', '.join(self._sections) or 'none'}")
        return self._sections[name]


@dataclass(frozen=True)
class Tensor:
    """An argument or a result: its shape over all devices, and the mesh axis that cuts each dimension, or None."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[str | None, ...]


@dataclass(frozen=True)
class StepHeader:
    """The inputs and outputs of an executable. A pair (i, j) in `donated`: output i takes the memory of input j."""

    platform: str
    topology: str
    devices: int
    jax: str
    kind: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    donated: tuple[tuple[int, int], ...]

    def to_json(self) -> dict[str, Any]:
        """The members of an envelope's header; see the grammar above."""
        return asdict(self)

    @classmethod
    def parse(cls, members: Mapping[str, Any], source: str) -> StepHeader:
        """Read a header's members. Raises ArtifactError that names `source` and the member that is wrong.

        What is read is consistent: each tensor has a rank of at most MAX_RANK and is cut along one dimension at most,
        which the devices divide; no input is donated twice, and only to an output of its own shape, dtype and cut.
        """
        check = _Check(members, source)
        devices = check.integer("devices", members.get("devices"), 1, MAX_DEVICES)
        inputs, outputs = check.tensors("inputs", devices), check.tensors("outputs", devices)
        return cls(
            check.one_of("platform", PLATFORMS), check.text("topology"), devices, check.text("jax"),
            check.one_of("kind", KINDS), inputs, outputs, check.donated(inputs, outputs),
        )  # fmt: skip


class _Check:
    """Checks of one header's members; each returns the value or raises ArtifactError."""

    def __init__(self, members: Mapping[str, Any], source: str) -> None:
        self._members = members
        self._source = source

    def fail(self, problem: str) -> NoReturn:
        _fail(self._source, f"damaged, or not made by llmc: {problem}")

    def require(self, holds: bool, problem: str) -> None:
        if not holds:
            self.fail(problem)

    def text(self, name: str) -> str:
        value = self._members.get(name)
        self.require(isinstance(value, str), f"{name!r} must be a string")
        return str(value)

    def one_of(self, name: str, known: Sequence[str]) -> str:
        self.require(self._members.get(name) in known, f"{name!r} must be one of {', '.join(known)}")
        return str(self._members[name])

    def integer(self, where: str, value: object, least: int, largest: int) -> int:
        if type(value) is not int or not least <= value <= largest:
            self.fail(f"{where} must be an integer from {least} to {largest}")
        return value

    def items(self, where: str, value: object) -> list[Any]:
        if not isinstance(value, list | tuple):
            self.fail(f"{where} must be a list")
        return list(value)

    def tensors(self, name: str, devices: int) -> tuple[Tensor, ...]:
        found = self.items(repr(name), self._members.get(name))
        return tuple(self.tensor(f"{name}[{at}]", tensor, devices) for at, tensor in enumerate(found))

    def tensor(self, where: str, found: Any, devices: int) -> Tensor:
        self.require(isinstance(found, Mapping), f"{where} must be an object")
        name, dtype = found.get("name"), found.get("dtype")
        self.require(isinstance(name, str) and name != "", f"{where}.name must be a string that is not empty")
        self.require(dtype in DTYPES, f"{where}.dtype must be one of {', '.join(DTYPES)}")
        shape = self.items(f"{where}.shape", found.get("shape"))
        dims = self.items(f"{where}.dims", found.get("dims"))
        self.require(len(dims) == len(shape) <= MAX_RANK, f"{where} must have a dim for each of 0 to {MAX_RANK} sizes")
        for size, dim in zip(shape, dims, strict=True):
            self.integer(f"{where}.shape", size, 0, MAX_DIMENSION)
            self.require(dim is None or dim == AXIS, f"{where}.dims must be null or {AXIS!r}")
            self.require(dim is None or size % devices == 0, f"{where} has {size} to cut for {devices} devices")
        self.require(dims.count(AXIS) <= 1, f"{where} is cut twice")
        return Tensor(str(name), tuple(shape), str(dtype), tuple(dims))

    def donated(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
        pairs = [self.items("donated[…]", pair) for pair in self.items("'donated'", self._members.get("donated"))]
        for pair in pairs:
            self.require(
                len(pair) == 2 and _is_index(pair[0], outputs) and _is_index(pair[1], inputs),
                f"donated[…] must be [output, input], below {len(outputs)} and {len(inputs)}",
            )
            out, given = outputs[pair[0]], inputs[pair[1]]
            same = (out.shape, out.dtype, out.dims) == (given.shape, given.dtype, given.dims)
            self.require(same, f"output {out.name!r} does not fit where input {given.name!r} lies")
        for side in zip(*pairs, strict=True):
            self.require(len(set(side)) == len(side), "'donated' names one tensor twice")
        return tuple((out, given) for out, given in pairs)


def _is_index(value: object, of: Sequence[object]) -> bool:
    return type(value) is int and 0 <= value < len(of)


def _encode(header: Mapping[str, Any], layout: Mapping[str, tuple[int, int]]) -> bytes:
    body = {**header, "version": VERSION, "sections": layout}
    return canonical_json({**body, "digest": digest_bytes(canonical_json(body))})


def _decode(data: bytes, source: str) -> dict[str, Any]:
    try:
        members = loads_object(data)
        if type(version := members.get("version")) is int and version > VERSION:
            _newer(source, f"version {version}")
        body = {name: value for name, value in members.items() if name != "digest"}
        if members.get("digest") != digest_bytes(canonical_json(body)) or data != canonical_json(members):
            _fail(source, "damaged: its header is not what was written")
    except (ValueError, RecursionError) as error:
        _fail(source, f"damaged: its header is not JSON ({error})", error)
    if type(version) is not int or version != VERSION:
        _fail(source, f"version {version!r:.40} of the format is not one that llmc ever wrote")
    return members


def _cut(view: memoryview, length: int, found: object, source: str) -> dict[str, memoryview]:
    """The sections, after checking that they lie where the format puts them."""
    if not isinstance(found, dict) or not all(_is_place(name, place) for name, place in found.items()):
        _fail(source, "'sections' must be {name: [offset, size]}")
    layout = _layout(length, {name: size for name, (_, size) in sorted(found.items())})
    end = _FRAME + length
    for name, (offset, size) in layout.items():
        if found[name][0] != offset:
            _fail(source, f"section {name!r} is said to begin at {found[name][0]}, where {offset} is its place")
        if any(view[end:offset]):
            _fail(source, f"damaged: something lies before section {name!r}")
        end = offset + size
    if end != len(view):
        _fail(source, f"damaged: it has {len(view)} bytes, where its header says {end}")
    return {name: view[offset : offset + size] for name, (offset, size) in layout.items()}


def _is_place(name: str, place: object) -> bool:
    """Whether a member of "sections" has the form name: [offset, size]."""
    return (
        _NAME.fullmatch(name) is not None
        and isinstance(place, list)
        and len(place) == 2
        and all(type(number) is int and 0 <= number < 1 << 63 for number in place)
    )


def _layout(length: int, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Offset and size of each section behind a header of `length` bytes."""
    places, end = dict[str, tuple[int, int]](), _FRAME + length
    for name, size in sizes.items():
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        places[name] = offset, size
        end = offset + size
    return places


def _newer(source: str, version: str, what: str = FORMS[MAGIC]) -> NoReturn:
    raise ArtifactError(
        f"{source}: {what} of format {version}, which a newer llmc wrote; upgrade llmc, or compile it again "
        f"with this version of `llmc compile`"
    )


def _fail(source: str, problem: str, cause: Exception | None = None) -> NoReturn:
    raise ArtifactError(f"{source}: {problem}; compile it again with `llmc compile`") from cause
