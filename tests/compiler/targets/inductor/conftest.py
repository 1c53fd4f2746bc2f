"""A portable bundle for inductor, of one layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.artifacts.store.store import Store
from llmc.buckets.limits import Limits
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.testing.toy import toy_plan
from tests.compiler import tiny


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt and a decode bucket of a llama of one layer, portable."""
    folder = tmp_path_factory.mktemp("inductor")
    model = tiny.write_model(folder / "llama", "llama-one-kv-head-linear-rope")
    plan = toy_plan([(1, 16, 0)], [(2, 16)], Limits(16, 2, 16, 8))
    asked = CompileOptions("inductor", "none", verify="none")
    compile_bundle(str(model), folder / "bundle", plan, asked, Store(folder / "store"), lambda _: None)
    return folder / "bundle"
