"""The architectures of `pytest tests/models -k NAME`: each file in llmc/compiler/architectures, and other forms.

The default tier has one for each mechanism, the full suite all.
"""

from __future__ import annotations

import pytest

from llmc.compiler.architectures import supported
from llmc.compiler.architectures.shared.caches import cache_of
from tests.compiler import tiny
from tests.tiers import default_cases

MECHANISMS = {
    "bloom": "ALiBi",
    "deepseek_v3": "latent attention, experts by group",
    "gemma3_text": "a rotary embedding each for local and global layers, normed queries and keys",
    "gemma4_text": "layers that read the keys and values of earlier ones, an embedding for each layer",
    "gpt2": "learned positions, queries, keys and values in one tensor",
    "gpt_oss": "attention sinks, clamped experts",
    "jamba": "Mamba between attention and experts",
    "lfm2": "short convolutions",
    "llama": "rotary embeddings, grouped heads",
    "mistral": "a sliding window",
    "mixtral": "experts",
    "qwen3_5_text": "the gated delta rule",
}
"""One architecture for each mechanism of attention, of states, and of experts."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `family` runs for each, one with `stateful` for those that keep states."""
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", [*supported(), *tiny.FORMS])
    if "stateful" in metafunc.fixturenames:
        stateful = [family for family in supported() if cache_of(tiny.of_family(family)).states]
        metafunc.parametrize("stateful", stateful)


def pytest_itemcollected(item: pytest.Item) -> None:
    if {"family", "stateful"} & set(getattr(item, "fixturenames", ())) and not item.get_closest_marker("default_cases"):
        item.add_marker(default_cases(*MECHANISMS))
