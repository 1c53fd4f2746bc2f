"""How many blocks a paged cache has: from the slots, or from the space it is given (VLLM_OPENVINO_KVCACHE_SPACE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.errors import DeviceError, InputError
from llmc.runtime.executors.openvino.blocks import BLOCK, block_bytes
from llmc.runtime.host import available_memory

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheTensor

GIB = 1 << 30


@dataclass(frozen=True)
class Pool:
    """`blocks` of a cache; `shared`: they are fewer than all slots may ask for together."""

    blocks: int
    shared: bool


def pool_blocks(
    precision: str, kept: Sequence[CacheTensor], slots: int, capacity: int, space: float | None
) -> Pool:  # fmt: skip
    """Blocks of `kept` for `slots` sequences of `capacity` tokens, or as many as `space` GiB hold.

    Raises InputError for a space that holds no sequence at all, and
    DeviceError for one that this host's memory does not: each says what would fit.
    """
    each = -(-capacity // BLOCK)
    wanted, size = slots * each, block_bytes(precision, kept)
    if not space or not size:
        return Pool(wanted, shared=False)
    blocks = int(space * GIB) // size
    if blocks < 2:
        raise InputError(
            f"VLLM_OPENVINO_KVCACHE_SPACE={space:g} GiB holds no sequence: {BLOCK} tokens take {size:,} bytes; "
            f"{each * size / GIB:.3g} GiB hold one of {capacity} tokens, {wanted * size / GIB:.3g} GiB all {slots}"
        )
    blocks = min(blocks, wanted)
    available = available_memory()
    if available is not None and blocks * size > available:
        raise DeviceError(
            f"VLLM_OPENVINO_KVCACHE_SPACE={space:g} GiB does not fit: {blocks * size / GIB:.3g} GiB would be used and "
            f"{available / GIB:.3g} GiB of memory are free here; ask for at most {available / GIB * 0.9:.3g}"
        )
    return Pool(blocks, shared=blocks < wanted)
