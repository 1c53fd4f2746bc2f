"""How many blocks a paged cache has, from the slots, or from the space that it is given (VLLM_OPENVINO_KVCACHE_SPACE).

bytes of a block = layers · kv_heads · (keys: BLOCK · head_dim numbers, u8: + 8 · head_dim bytes;
                                        values: the same, u8: + 8 · BLOCK bytes)
"""

from __future__ import annotations

from dataclasses import dataclass

from llmc.errors import DeviceError, InputError
from llmc.runtime.executors.openvino.blocks import BLOCK, PRECISIONS
from llmc.runtime.host import available_memory

GIB = 1 << 30


@dataclass(frozen=True)
class Pool:
    """`blocks` of a cache; `shared`: they are fewer than all slots may ask for together."""

    blocks: int
    shared: bool


def block_bytes(precision: str, layers: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of one block of all layers."""
    plain = 2 * BLOCK * head_dim * PRECISIONS[precision]
    return layers * kv_heads * (plain + (8 * head_dim + 8 * BLOCK if precision == "u8" else 0))


def pool_blocks(
    precision: str, sizes: tuple[int, int, int], slots: int, capacity: int, space: float | None
) -> Pool:  # fmt: skip
    """Blocks for `slots` sequences of `capacity` tokens, or as many as `space` GiB hold.

    `sizes` are layers, kv_heads and head_dim. Raises InputError for a space that holds no sequence at all, and
    DeviceError for one that this host's memory does not: each says what would fit.
    """
    each = -(-capacity // BLOCK)
    wanted, size = slots * each, block_bytes(precision, *sizes)
    if not space:
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
