"""How the attention kernel divides a step: rows, blocks and splits, from shapes alone.

Sizes of tiles are powers of two of at least 16: Triton's own rule for operands of a product on tensor cores
(`tl.dot` in its documentation). Nothing here was tuned on a card.
"""

from __future__ import annotations

from dataclasses import dataclass

_LEAST = 16
_BLOCK_BYTES = 16 * 1024
"""Keys of one block. Two stages of keys and values, with the queries, fit the 99 KiB that a program may have on the
smallest cards (compute capability 8.6 and 8.9; CUDA C++ Programming Guide, "Technical Specifications")."""
_ROWS = 64
"""Query rows of a program at most."""
_SUMS = 64 * 128
"""Sums of a program, unless its values are wider than 512: 64 registers a thread of 128."""
_PROGRAMS = 264
"""Programs wanted: two for each of an H100's 132 multiprocessors."""
_SPLIT_TOKENS = 256
"""Places for which a split of its own pays."""


@dataclass(frozen=True)
class Tiling:
    """Sizes of one step's attention, and how programs divide it."""

    batch: int
    kv_heads: int
    group: int
    """Query heads of a key/value head."""
    query: int
    head_dim: int
    """Of queries and keys."""
    value_dim: int
    """Of values, and of what comes out."""
    places: int
    """Of a row's cached tokens; 0 without a cache."""
    item_bytes: int
    """Bytes of a number of query, key and value."""
    wraps: bool = False
    """Whether a row may have more cached tokens than places, of which these are a ring then."""

    @property
    def padded_dim(self) -> int:
        """head_dim, as a power of two."""
        return _power(self.head_dim)

    @property
    def padded_value(self) -> int:
        """value_dim, as a power of two."""
        return _power(self.value_dim)

    @property
    def rows(self) -> int:
        """Query rows of a program."""
        return min(_power(self.group * self.query), _ROWS, max(_LEAST, _SUMS // self.padded_value))

    @property
    def tiles(self) -> int:
        """Programs that share the query rows of one head."""
        return -(-self.group * self.query // self.rows)

    @property
    def block(self) -> int:
        """Places read at once."""
        widest = max(self.padded_dim, self.padded_value)
        return max(_LEAST, min(128, _BLOCK_BYTES // (widest * self.item_bytes)))

    @property
    def block_new(self) -> int:
        """New tokens read at once."""
        return min(self.block, _power(self.query))

    @property
    def splits(self) -> int:
        """Programs that share the places of one tile: enough to fill a card, each with a share that pays."""
        wanted = _PROGRAMS // (self.batch * self.kv_heads * self.tiles)
        return max(1, min(wanted, -(-self.places // _SPLIT_TOKENS)))


def _power(number: int) -> int:
    """The least power of two that is a tile's size and holds `number`."""
    return max(_LEAST, 1 << (number - 1).bit_length())
