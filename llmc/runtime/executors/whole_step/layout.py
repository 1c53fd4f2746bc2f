"""How any cache (runtime/cache_shape.py) lies on a card: in few arrays.

    keys and values   [tensors, slots, places, heads, width]
    states            [tensors, slots, *shape]

Tensors of one kind, size and dtype lie in one array, in the order of the cache's shape; of a ring, whose windows may
differ, the size is that of the ring. So where all keys and values are of one size, they are one array, and a step
writes all its new tokens at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.cache_shape import CacheShape, Dtype, Kind

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
"""torch's names."""


@dataclass(frozen=True)
class CardArray:
    """One array. `of_slot`: its sizes but for tensors and slots; `members`: which of the cache's tensors lie in it."""

    kind: Kind
    dtype: Dtype
    of_slot: tuple[int, ...]
    members: tuple[int, ...]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> CardArray:
        """What `to_json` gave."""
        return cls(fields["kind"], fields["dtype"], tuple(fields["of_slot"]), tuple(fields["members"]))

    def to_json(self) -> dict[str, Any]:
        """For another process."""
        return asdict(self)

    def size(self, slots: int) -> tuple[int, ...]:
        """Its shape for so many slots."""
        return (len(self.members), slots, *self.of_slot)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return len(self.members) * math.prod(self.of_slot) * (4 if self.dtype == "f32" else 2)

    def __str__(self) -> str:
        inner = ", ".join(map(str, self.of_slot))
        return f"{self.kind} {self.dtype} [{len(self.members)}, slots, {inner}]"


def lengths_of(arrays: Sequence[CardArray]) -> tuple[int, ...]:
    """How many places keys and values have in a slot, each number once; (1,) where there are none."""
    return tuple(dict.fromkeys(array.of_slot[0] for array in arrays if array.kind == "kv")) or (1,)


def cache_arrays(bundle: Bundle, capacity: int) -> tuple[CardArray, ...]:
    """Those of a bundle's cache, whose slots hold `capacity` tokens. Raises ArtifactError for one that has none."""
    return arrays_of(bundle.cache_shape, capacity, dtype_of(bundle))


def dtype_of(bundle: Bundle) -> Dtype:
    """What a bundle's programs compute in."""
    return "bf16" if bundle.manifest.options.get("dtype") == "bf16" else "f32"


def arrays_of(shape: CacheShape, capacity: int, dtype: Dtype) -> tuple[CardArray, ...]:
    """The arrays of a cache whose slots hold `capacity` tokens, in `dtype` where a tensor has none of its own."""
    found: dict[tuple[Kind, Dtype, tuple[int, ...]], list[int]] = {}
    for i, t in enumerate(shape):
        of_slot = (t.places(capacity), *t.shape) if t.kind == "kv" else t.shape
        found.setdefault((t.kind, t.dtype or dtype, of_slot), []).append(i)
    return tuple(CardArray(*like, tuple(members)) for like, members in found.items())
