"""How far rotary positions reach, by type."""

from __future__ import annotations

from typing import Any

import pytest

from llmc.compiler.architectures.shared.rope import positions

LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "reach"),
    [
        ({}, None),
        ({"max_position_embeddings": 0}, None),
        ({"max_position_embeddings": 8192}, (8192, 8192)),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, (2048, 8192)),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 0.5}}, (2048, 2048)),
        (
            {"max_position_embeddings": 65536, "rope_parameters": {
                "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}},
            (65536, 65536),
        ),
        (
            {"max_position_embeddings": 40960, "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
            (40960, 131072),
        ),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, (2048, 2048)),
        ({"max_position_embeddings": 131072, "rope_parameters": LONG}, (4096, 4096)),
        (
            {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
             "rope_scaling": {"type": "longrope"}},
            (4096, 4096),
        ),
        (
            {"max_position_embeddings": 512, "rope_parameters": {"full_attention": LONG, "sliding_attention": {}}},
            (512, 512),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_sequence_may_be_as_long_as_its_frequencies_stay(
    config: dict[str, Any], reach: tuple[int, int] | None
) -> None:
    assert positions(config) == reach
