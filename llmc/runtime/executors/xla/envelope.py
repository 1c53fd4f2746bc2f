"""The header of an XLA executable. The file is that of executors/envelope.py, with two sections: `native`, PJRT's own
serialisation of a compiled program, and `export`, the portable program it was compiled from (a blob of jax.export).

The header's members; others are ignored:

    step     = {"platform": "cpu" | "tpu" | "cuda" | "neuron", "topology": str, "devices": int, "jax": str,
               "kind": one of KINDS, "inputs": [tensor, …], "outputs": [tensor, …],
               "donated": [[output, input], …], …}
    tensor   = {"name": str, "shape": [int, …], "dtype": one of DTYPES, "dims": [null | "tp", …]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from llmc.errors import ArtifactError
from llmc.runtime.executors.envelope import Form

FORM = Form(b"LLMCXLA1", "an XLA executable")

PLATFORMS = ("cpu", "tpu", "cuda", "neuron")
KINDS = ("step", "slots", "encode")
"""A step over the cache, a program over its slots, and a model without a cache."""
DTYPES = ("float32", "bfloat16", "int32", "int8", "float8_e4m3fn")
AXIS = "tp"
MAX_RANK = 8
MAX_DIMENSION = 1 << 40
MAX_DEVICES = 1 << 16


@dataclass(frozen=True)
class Tensor:
    """An argument or a result: its shape over all devices, and the mesh axis that shards each dimension, or None."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[str | None, ...]


@dataclass(frozen=True)
class StepHeader:
    """The inputs and outputs of an executable. A pair (i, j) in `donated`: output i reuses the memory of input j."""

    platform: str
    topology: str
    devices: int
    jax: str
    kind: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    donated: tuple[tuple[int, int], ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, members: Mapping[str, Any], source: str) -> StepHeader:
        """Parse and check a header's members. Raises ArtifactError naming `source` and the invalid member.

        Each tensor has at most one sharded dimension, which the devices divide. No input is donated twice, and only to
        an output of its own shape, dtype and sharding.
        """
        check = _Check(members, source)
        devices = check.integer("devices", members.get("devices"), 1, MAX_DEVICES)
        inputs, outputs = check.tensors("inputs", devices), check.tensors("outputs", devices)
        return cls(
            check.one_of("platform", PLATFORMS), check.text("topology"), devices, check.text("jax"),
            check.one_of("kind", KINDS), inputs, outputs, check.donated(inputs, outputs),
        )  # fmt: skip


class _Check:
    def __init__(self, members: Mapping[str, Any], source: str) -> None:
        self._members = members
        self._source = source

    def fail(self, problem: str) -> NoReturn:
        raise ArtifactError(
            f"{self._source}: damaged, or not made by llmc: {problem}; compile it again with `llmc compile`"
        )

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
            self.require(dim is None or size % devices == 0, f"{where} has {size} to shard over {devices} devices")
        self.require(dims.count(AXIS) <= 1, f"{where} is sharded twice")
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
            self.require(same, f"output {out.name!r} does not fit the memory of input {given.name!r}")
        for side in zip(*pairs, strict=True):
            self.require(len(set(side)) == len(side), "'donated' names one tensor twice")
        return tuple((out, given) for out, given in pairs)


def _is_index(value: object, of: Sequence[object]) -> bool:
    return type(value) is int and 0 <= value < len(of)
