"""A portable bundle for inductor, of one layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compiler.compiled import of_one_layer


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt and a decode bucket of a llama of one layer, portable."""
    return of_one_layer(tmp_path_factory.mktemp("inductor"), "inductor", "llama-one-kv-head-linear-rope")
