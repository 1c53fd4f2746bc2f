"""The architectures of `pytest tests/models -k NAME`: each file in llmc/compiler/architectures, and other forms.

The path of most users, ONNX Runtime's, is tested with each architecture, in the default tier with one for each
mechanism. Portable programs and the reference, which trace the same modules, are tested with one for each mechanism.
"""

from __future__ import annotations

import pytest

from llmc.compiler.architectures import supported
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


STATES = ("bamba", "jamba", "lfm2", "qwen3_5_text")
"""One for each kind of state: Mamba 2 and Mamba beside attention, short convolutions, the gated delta rule."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `architecture` runs for each, one with `mechanism` for one of each, one with `stateful`
    for one of each kind of state."""
    for name, architectures in (
        ("architecture", [*supported(), *tiny.FORMS]),
        ("mechanism", MECHANISMS),
        ("stateful", STATES),
    ):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, architectures)


def pytest_itemcollected(item: pytest.Item) -> None:
    if "architecture" in getattr(item, "fixturenames", ()):
        item.add_marker(default_cases(*MECHANISMS))
