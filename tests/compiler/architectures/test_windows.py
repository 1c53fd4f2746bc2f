"""Which layers of a cache have a window: those to which transformers' configuration gives one."""

from __future__ import annotations

from typing import Any

import pytest

from llmc.compiler.architectures import supported
from llmc.compiler.architectures.shared.architectures import architecture
from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.frontend.skeleton import model_config
from tests.compiler import tiny

IN_TURN = [
    name
    for name in supported()
    if "layer_types" in architecture({"model_type": name}).reads and not cache_of(tiny.of_architecture(name)).states
]
"""Layers with a state come between layers that see all."""
LAYERS = 9
SAYINGS: tuple[dict[str, Any], ...] = (
    {}, {"sliding_window": 7}, {"sliding_window": 7, "use_sliding_window": True},
    {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 3},
)  # fmt: skip


@pytest.mark.parametrize("said", SAYINGS, ids=str)
@pytest.mark.parametrize("name", IN_TURN)
def test_windows_are_those_of_transformers_layer_types(name: str, said: dict[str, Any]) -> None:
    left_out = ("layer_types", "sliding_window", "no_rope_layers")
    config = {k: v for k, v in tiny.of_architecture(name).items() if k not in left_out}
    config |= {"num_hidden_layers": LAYERS, **said}
    found: Any = model_config(config)
    shape = cache_of(config)
    stated = [{t.window for t in shape.of_layer(i)} for i in range(LAYERS)]
    kept = LAYERS - config.get("num_kv_shared_layers", 0)
    assert stated[kept:] == [set()] * (LAYERS - kept), "layers that read earlier ones' keys have no tensors"
    window = found.sliding_window or None
    assert stated[:kept] == [{window if t == "sliding_attention" else None} for t in found.layer_types[:kept]]
