"""How many blocks a paged cache has: from the slots, or from the space it is given (VLLM_OPENVINO_KVCACHE_SPACE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.errors import DeviceError, InputError
from llmc.runtime.executors.openvino.blocks import BLOCK, block_bytes, rings_of
from llmc.runtime.host import available_memory

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheTensor

GIB = 1 << 30


@dataclass(frozen=True)
class Room:
    """`blocks` of a cache; `shared`: they are fewer than all slots may ask for together."""

    blocks: int
    shared: bool


def ring_blocks(ring: int, capacity: int) -> int:
    """Blocks that a slot holds of a ring between steps: its tokens begin and end anywhere in a block."""
    return min(-(-ring // BLOCK) + 1, -(-capacity // BLOCK))


def pool_blocks(
    precision: str, kept: Sequence[CacheTensor], slots: int, capacity: int, space: float | None
) -> Room:  # fmt: skip
    """Blocks of the tensors of `kept` that hold all tokens, for `slots` sequences of `capacity` tokens, or as many as
    `space` GiB hold beside the rings of the others.

    Raises InputError for a space that holds no sequence at all, and
    DeviceError for one that this host's memory does not: each says what would fit.
    """
    each = -(-capacity // BLOCK)
    wanted, size = slots * each, block_bytes(precision, [t for t in kept if t.ring is None])
    if not space or not block_bytes(precision, kept):
        return Room(wanted, shared=False)
    rings = sum(
        slots * ring_blocks(ring, capacity) * block_bytes(precision, [t for t in kept if t.ring == ring])
        for ring in rings_of(kept)
    )
    given = int(space * GIB) - rings
    blocks = min(wanted, given // size if size else wanted)
    if given < 0 or blocks < 2:
        said = f"{BLOCK} tokens take {size:,} bytes" if size else "layers with windows hold all that there is"
        if rings:
            said += f", rings of windows {rings / GIB:.3g} GiB for {slots} slots"
        raise InputError(
            f"VLLM_OPENVINO_KVCACHE_SPACE={space:g} GiB holds no sequence: {said}; "
            f"{(each * size + rings) / GIB:.3g} GiB hold one of {capacity} tokens, "
            f"{(wanted * size + rings) / GIB:.3g} GiB all {slots}"
        )
    available = available_memory()
    if available is not None and blocks * size + rings > available:
        raise DeviceError(
            f"VLLM_OPENVINO_KVCACHE_SPACE={space:g} GiB does not fit: {(blocks * size + rings) / GIB:.3g} GiB would be "
            f"used and {available / GIB:.3g} GiB of memory are free here; ask for at most {available / GIB * 0.9:.3g}"
        )
    return Room(blocks, shared=blocks < wanted)
