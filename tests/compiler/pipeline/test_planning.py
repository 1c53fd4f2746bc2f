"""Whether a plan needs contexts is what the model's cache says, not its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.buckets.report.text import plan_text
from llmc.compiler.architectures.shared import caches
from llmc.compiler.architectures.shared.base import Architecture
from llmc.compiler.pipeline.planning import plan_for
from llmc.runtime.cache_shape import CacheShape, CacheTensor, key_value

STATE = CacheTensor(0, "recurrent", "state", (4, 4), dtype="f32")
CONFIG = {
    "model_type": "fading", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 64,
    "num_attention_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "contexts"),
    [((STATE,), False), ((STATE, *key_value(1, 2, 8)), True), (key_value(0, 2, 8), True), ((), True)],
    ids=["states", "hybrid", "attention", "nothing"],
)
def test_contexts_are_planned_for_models_that_read_cached_tokens(
    tensors: tuple[CacheTensor, ...], contexts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    own = Architecture(model_class="", tiny={}, cache=lambda config: CacheShape(2, tensors))
    monkeypatch.setattr(caches, "architecture_or_plain", lambda config: own)
    plan = plan_for(str(config), max_model_len=512, max_num_seqs=2)
    assert plan.limits.contexts is contexts
    assert any(bucket.context for bucket in plan.decode) is contexts
    assert ("contexts: none, the model has only recurrent state (model config)" in plan_text(plan)) is not contexts


def test_a_configuration_that_does_not_say_its_cache_keeps_contexts(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "fading"}))
    assert plan_for(str(config), max_model_len=512).limits.contexts


@pytest.mark.parametrize(("unit", "scale"), [(None, 1), ("tokens", 1), ("blocks", 128)])
def test_ranges_of_contexts_are_in_their_unit(unit: str | None, scale: int) -> None:
    ranges = {"prompt_context": (0, 64, 192), "decode_seq": (64, 64, 256)}
    plan = plan_for(None, max_model_len=512 * scale, max_num_seqs=2, block_size=128, context_unit=unit, **ranges)
    assert {bucket.context for bucket in plan.prompt} >= {0, 64 * scale, 192 * scale}
    assert {bucket.context for bucket in plan.decode} >= {64 * scale, 256 * scale}
