"""What one of several described devices holds of a step's arrays."""

from __future__ import annotations

from llmc.compiler.targets.xla.capacity import CachePart
from llmc.compiler.targets.xla.described import _cache_parts
from llmc.runtime.cache_shape import CacheTensor, key_value


def test_keys_and_values_are_split_by_heads_where_these_divide_and_states_are_whole() -> None:
    key, value = key_value(0, 4, 16, 32)
    groups = [[key], [value], [CacheTensor(1, "conv", "state", (3, 96))], list(key_value(2, 3, 16))]
    shapes = [[1, 8, 4, 49, 16], [1, 8, 4, 49, 32], [1, 8, 3, 96], [2, 8, 3, 49, 16]]
    kinds = ["kv", "kv", "state", "kv"]
    layout = {
        "cache": [{"kind": kind, "shape": shape, "dtype": "float32"} for kind, shape in zip(kinds, shapes, strict=True)]
    }
    assert _cache_parts(layout, groups, 2) == [
        CachePart("kv", (1, 8, 2, 49, 16), 4), CachePart("kv", (1, 8, 2, 49, 32), 4),
        CachePart("state", (1, 8, 3, 96), 4), CachePart("kv", (2, 8, 3, 49, 16), 4),
    ]  # fmt: skip
