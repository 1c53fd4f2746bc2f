"""Whether a plan fits the memory of its devices, and the largest plan that does. Bytes are per device.

    need = weights + cache + the largest step's temporary memory + the code of all executables

Weights, cache and code stay on the device while a server runs. One step runs at a time, and needs its temporary memory
and that of outputs that do not reuse an input's. The memory for programs is a property of the chip (tpu.py,
cuda/gpus.py); XLA refuses one executable that needs more, but not a set of them.

`DescribedMachine` is a machine known only by description: its devices, their memory, and its array layouts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from llmc.errors import CompileError

if TYPE_CHECKING:
    from llmc.buckets.limits import Limits
    from llmc.runtime.cache_shape import CacheTensor


class DescribedMachine(ABC):
    """Equal devices that one graph can be sharded over. Bytes are per device."""

    larger: ClassVar[str]
    """What to choose where nothing fits, in words: "a topology of larger chips"."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name on the command line."""

    @property
    @abstractmethod
    def devices(self) -> int: ...
    @property
    @abstractmethod
    def usable_bytes(self) -> int:
        """Bytes of a device's memory that programs may use."""

    @property
    @abstractmethod
    def unit(self) -> str:
        """What one device is called."""

    @property
    @abstractmethod
    def components(self) -> dict[str, str]:
        """Key components: all that executables depend on."""

    @abstractmethod
    def array_bytes(self, shape: Sequence[int], item_bytes: int) -> int:
        """Return the bytes of an array on a device, padding included."""

    @abstractmethod
    def describe(self) -> list[Any]:
        """Return its JAX devices, which compile but do not run (xla/client.py comes first). Raises DeviceError."""


ArrayKind: TypeAlias = Literal["kv", "ring", "state"]
"""What a cache array has for a sequence: a slot for each token, a ring buffer, or a recurrent state."""

ArrayBytes: TypeAlias = "Callable[[Sequence[int], int], int]"
"""Maps a shape and bytes per number to the array's bytes on a device."""


@dataclass(frozen=True)
class Need:
    """A plan's memory on one device, in bytes. Temporary memory and code are 0 before compilation."""

    weights: int
    cache: int
    temporary: int = 0
    code: int = 0

    @classmethod
    def of(cls, weights: int, cache: int, executables: Iterable[Mapping[str, int]]) -> Need:
        """Combine with XLA's figures of each executable: its bytes of "temporary", "outputs", "aliased" and "code"."""
        found = list(executables)
        return cls(
            weights,
            cache,
            max((m["temporary"] + m["outputs"] - m["aliased"] for m in found), default=0),
            sum(m["code"] for m in found),
        )

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.temporary + self.code

    def __str__(self) -> str:
        parts = [("weights", self.weights), ("cache", self.cache)]
        parts += [(name, n) for name, n in (("largest step", self.temporary), ("code", self.code)) if n]
        return ", ".join(f"{name} {gib(n)}" for name, n in parts)


CAPACITY_MULTIPLE = 128
"""Slot capacities are a multiple of a TPU's lanes; else XLA changes the cache's layout, and copies it, in
every step.
"""


def capacity(tokens: int) -> int:
    """Return the capacity of a slot for so many tokens."""
    return -(-tokens // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE


def array_kind(tensor: CacheTensor) -> ArrayKind:
    """Return the array kind of such tensors."""
    return tensor.kind if tensor.ring is None else "ring"


def values_bytes(shape: Sequence[int], item_bytes: int) -> int:
    """Return the bytes of an array's values, without padding."""
    return math.prod(shape) * item_bytes


@dataclass(frozen=True)
class CachePart:
    """One device's share of a cache array: keys or values [layers, slots, kv_heads, offsets, head_dim], which grow with
    a slot's tokens (in a ring buffer up to its size), or recurrent states [layers, slots, …].
    """

    kind: ArrayKind
    shape: tuple[int, ...]
    item_bytes: int

    def sized(self, slots: int, capacity: int) -> tuple[int, ...]:
        layers, _, *inner = self.shape
        if self.kind != "state":
            inner[1] = min(capacity, inner[1]) if self.kind == "ring" else capacity
        return (layers, slots, *inner)


@dataclass(frozen=True)
class Cache:
    """The cache on one device: its `parts`, with more slots and tokens than max_num_seqs and max_model_len, rounded up.

    With `fixed_slots` the number of slots was requested (--cache-slots).
    """

    parts: tuple[CachePart, ...]
    spare_slots: int = 0
    spare_tokens: int = 0
    fixed_slots: bool = False
    array_bytes: ArrayBytes = field(default=values_bytes, compare=False)

    @classmethod
    def of(
        cls,
        parts: Sequence[CachePart],
        limits: Limits,
        fixed_slots: bool = False,
        array_bytes: ArrayBytes = values_bytes,
    ) -> Cache:
        """Derive spare slots and tokens from parts that were sized for `limits`."""
        spare = max((p.shape[3] for p in parts if p.kind == "kv"), default=0) - capacity(limits.max_model_len)
        return cls(tuple(parts), parts[0].shape[1] - limits.max_num_seqs, max(spare, 0), fixed_slots, array_bytes)

    def bytes(self, max_num_seqs: int, max_model_len: int) -> int:
        """Return the bytes of all parts for that many sequences of that length; grows with both."""
        slots, tokens = max_num_seqs + self.spare_slots, capacity(max_model_len) + self.spare_tokens
        return sum(self.array_bytes(part.sized(slots, tokens), part.item_bytes) for part in self.parts)

    @property
    def grows(self) -> bool:
        return any(part.kind != "state" for part in self.parts)


@dataclass(frozen=True)
class Largest:
    """The most sequences at the requested length, and the longest length for the requested sequences.

    0 where not one fits, and where length takes no memory. With a requested number of slots, `max_num_seqs` counts
    slots.
    """

    max_num_seqs: int
    max_model_len: int


def largest_that_fits(need: Need, cache: Cache, limits: Limits, available: int) -> Largest:
    """Return what fits in `available` bytes with the same weights, temporary memory and code.

    More may fit, since temporary memory shrinks with a plan. Lengths below 2 are none.
    """
    room = available - (need.total - need.cache)
    counted = replace(cache, spare_slots=0) if cache.fixed_slots else cache
    most = limits.max_num_seqs + (cache.spare_slots if cache.fixed_slots else 0)
    seqs = _most(most, lambda n: counted.bytes(n, limits.max_model_len) <= room)
    length = _most(limits.max_model_len, lambda n: cache.bytes(limits.max_num_seqs, n) <= room) if cache.grows else 0
    return Largest(seqs, length if length >= 2 else 0)


def require_fits(
    need: Need,
    topology: DescribedMachine,
    cache: Cache,
    limits: Limits,
    degrees: Mapping[int, Need] | None = None,
    lighter: Sequence[str] = (),
) -> None:
    """Raise CompileError where `need` exceeds a device of `topology`, with the excess and what fits.

    `degrees`: the need under other degrees of tensor parallelism. `lighter`: flags under which steps take less
    temporary memory.
    """
    available = topology.usable_bytes
    if need.total <= available:
        return
    largest = largest_that_fits(need, cache, limits, available)
    wider = min((d for d, other in (degrees or {}).items() if other.total <= available), default=0)
    options = []
    if largest.max_num_seqs:
        flag = (
            f"--cache-slots {largest.max_num_seqs}" if cache.fixed_slots else f"--max-num-seqs {largest.max_num_seqs}"
        )
        options.append(f"{flag} at {limits.max_model_len} tokens")
    if largest.max_model_len:
        several = "1 sequence" if limits.max_num_seqs == 1 else f"{limits.max_num_seqs} sequences"
        options.append(f"--max-model-len {largest.max_model_len} for {several}")
    if wider:
        options.append(f"--tensor-parallel {wider}")
    if need.total - need.temporary <= available:
        options += [f"{flag}, with less temporary memory" for flag in lighter]
    what = "the weights alone do not fit" if need.weights > available else "no sequence fits in the remaining memory"
    nothing = f"{what}: choose more --tensor-parallel, or {topology.larger} (llmc devices lists them)"
    raise CompileError(
        f"does not fit {topology.name} by {gib(need.total - available)} a {topology.unit}: {need}; "
        f"a {topology.unit} has {gib(available)} for programs; "
        + (f"largest that fits: {', or '.join(options)}" if options else nothing)
    )


def gib(amount: int) -> str:
    """Format bytes for people: GiB, or MiB or bytes for small amounts."""
    if amount < 1 << 20:
        return f"{amount} byte{'s' * (amount != 1)}"
    return f"{amount / (1 << 30):,.2f} GiB" if amount >= 1 << 30 else f"{amount / (1 << 20):.1f} MiB"


def _most(highest: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `highest` that fits, by binary search; 0 if none."""
    low, high = 0, highest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
