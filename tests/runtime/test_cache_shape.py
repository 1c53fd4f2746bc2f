"""The shape of a model's cache: keys and values that grow with tokens, states that do not, and what manifests say."""

from __future__ import annotations

from typing import Any

import pytest

from llmc.compiler.architectures.shared.cache import attention_cache, late_window_cache
from llmc.runtime.cache_shape import ANYWHERE, CacheShape, CacheTensor, Rewind, Uniform, key_value

MIXED = CacheShape(
    3,
    (
        CacheTensor(0, "conv", "state", (12, 4)),
        CacheTensor(0, "recurrent", "state", (2, 8, 8), dtype="f32"),
        *key_value(1, 2, 16, 8, window=5),
    ),
)


def test_layers_with_one_key_and_value_are_uniform_whatever_their_windows() -> None:
    assert CacheShape.plain(3, 2, 16, [None, 4, None]).uniform == Uniform(3, 2, 16)
    assert CacheShape.plain(30, 3, 64).token_values * 4 == 46_080


@pytest.mark.parametrize(
    "tensors",
    [
        MIXED.tensors,
        (),
        (*key_value(0, 2, 16), *key_value(1, 4, 16)),
        key_value(0, 2, 16, 8) + key_value(1, 2, 16, 8),
        key_value(0, 2, 16),
        tuple(reversed(key_value(0, 2, 16))) + key_value(1, 2, 16),
    ],
    ids=["states", "nothing", "heads", "wider keys", "a layer without", "values first"],
)
def test_any_other_cache_is_not_uniform(tensors: tuple[CacheTensor, ...]) -> None:
    assert CacheShape(2, tensors).uniform is None


def test_states_take_the_same_room_for_any_number_of_tokens() -> None:
    states = 4 * (12 * 4) // 2 + 4 * 2 * 8 * 8
    assert MIXED.nbytes(0, "bf16") == states
    assert MIXED.nbytes(10, "bf16") == states + 10 * 2 * (2 * 16 + 2 * 8)


def test_a_manifest_gives_back_what_was_written() -> None:
    assert CacheShape.from_json(3, MIXED.to_json()) == MIXED


KEY: dict[str, Any] = {"layer": 0, "name": "key", "kind": "kv", "shape": [2, 16]}
STATE: dict[str, Any] = {"layer": 0, "name": "conv", "kind": "state", "shape": [4]}


@pytest.mark.parametrize(
    "tensors",
    [
        {}, [1], [KEY | {"layer": 3}], [KEY | {"layer": -1}], [KEY | {"layer": True}], [KEY | {"name": ""}],
        [KEY | {"kind": "ring"}], [KEY | {"kind": []}], [KEY | {"shape": [2]}], [KEY | {"shape": [2, 0]}],
        [KEY | {"shape": "2"}], [KEY | {"shape": [1 << 30, 1 << 30]}], [KEY | {"window": 0}], [KEY | {"window": "4"}],
        [KEY | {"dtype": "int8"}], [KEY | {"more": 1}], [STATE | {"window": 4}], [STATE | {"shape": []}, STATE],
        [KEY, KEY], [KEY | {"layer": 1}, KEY], [KEY | {"ring": 8}], [KEY | {"window": 4, "ring": 3}],
        [KEY | {"window": 4, "ring": "8"}], [STATE | {"ring": 8}],
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_that_states_no_cache_is_an_error(tensors: object) -> None:
    with pytest.raises(ValueError, match=r"cache|layer"):
        CacheShape.from_json(3, tensors)


def test_a_model_of_some_layers_has_their_tensors_numbered_anew() -> None:
    assert MIXED.only([2, 1]) == CacheShape(2, key_value(1, 2, 16, 8, window=5))


CONFIG = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
TYPES = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("rule", "config", "windows"),
    [
        (attention_cache, {}, [None] * 3),
        (attention_cache, {"sliding_window": 7}, [7] * 3),
        (attention_cache, {"sliding_window": 7, "layer_types": TYPES}, [None, 7, None]),
        (late_window_cache, {"sliding_window": 7}, [None] * 3),
        (late_window_cache, {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2}, [None, None, 7]),
        (late_window_cache, {"sliding_window": 7, "use_sliding_window": True, "layer_types": TYPES}, [None, 7, None]),
        (late_window_cache, {"sliding_window": 7, "use_sliding_window": False, "layer_types": TYPES}, [None] * 3),
    ],
)
def test_windows_are_those_that_the_configuration_requests(
    rule: Any, config: dict[str, Any], windows: list[int | None]
) -> None:
    assert [t.window for t in rule(CONFIG | config) if t.name == "key"] == windows


def test_windows_lie_in_rings_where_a_sequence_may_be_longer() -> None:
    shape = CacheShape.plain(3, 2, 16, [None, 8, 40])
    held = shape.in_rings(spare=4, longest=32, multiple=4)
    assert [t.ring for t in held] == [None, None, 12, 12, None, None]
    assert [t.size(2, 30)[2] for t in held] == [30, 30, 12, 12, 30, 30]
    assert held.uniform is None
    assert len(held.groups) == 4
    assert held.without_rings == shape
    assert CacheShape.from_json(3, held.to_json()) == held
    assert shape.nbytes(30, "f16") - held.nbytes(30, "f16") == 2 * 18 * 2 * 16 * 2
    assert held.kv_values(30) == 2 * 32 * (30 + 12 + 30)


def test_a_step_starts_again_where_every_ring_has_its_window() -> None:
    rewind = CacheShape.plain(2, 1, 4, [4, 6]).in_rings(2, 100).rewind
    assert rewind == Rewind(rings=((4, 6), (6, 8)))
    assert (rewind.free, rewind.most) == (False, 2)
    assert [rewind.floor(end) for end in (6, 7, 8, 9, 20)] == [0, 4, 5, 6, 17]
    assert Rewind(states=True).floor(9) == 9
    assert ANYWHERE.floor(9) == 0
