"""A model that compiles and does not match is refused with the layer where it first differs from the reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from llmc.artifacts.store.store import Store
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend import trace
from llmc.compiler.frontend.attention import TraceCache
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.verification.layers import first_difference
from llmc.errors import VerificationError
from llmc.runtime.executors.onnxruntime import executor
from tests.compiler import tiny
from tests.tiers import default_cases, full

FORWARD = LlamaAttention.forward


def scaled_where_traced(layer: int) -> Any:
    """Attention that computes something else over a cache that is not transformers' own, in one layer."""

    def forward(self: LlamaAttention, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        wrong = self.layer_idx == layer and isinstance(kwargs.get("past_key_values"), TraceCache)
        return FORWARD(self, hidden_states * (1.5 if wrong else 1), *args, **kwargs)

    return forward


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("trace", "trace_weightless"):  # what is patched is traced anew
        monkeypatch.setattr(trace, name, tiny.remembered(getattr(trace, name).__wrapped__))
    return tiny.write_model(tmp_path / "model", "llama")


def compile_it(folder: Path) -> None:
    options = CompileOptions("onnxruntime", quantize="none")
    compile_bundle(str(folder), folder / "bundle", tiny.kinds_plan(), options, Store(folder / "store"), lambda _: None)


@default_cases(1)
@pytest.mark.parametrize("layer", [0, 1])
def test_an_architecture_that_traces_and_computes_something_else_is_refused_with_the_layer(
    folder: Path, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaAttention, "forward", scaled_where_traced(layer))
    with pytest.raises(VerificationError) as refused:
        compile_it(folder)
    said = str(refused.value)
    assert "compiled graphs disagree with the reference model in" in said
    before = r", after those before it by \de-0\d" if layer else ""
    wanted = (
        rf"first differ from the reference's after layer {layer} of 0 … 1 \(LlamaDecoderLayer\), by \S+ of their size"
    )
    assert re.search(wanted + before + ": that layer is traced wrongly", said), said
    assert not (folder / "bundle").exists()


@full
def test_a_fault_behind_the_trace_is_not_laid_on_a_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = executor.BoundSession.run

    def twice(self: Any, inputs: Any, results: Any) -> None:
        run(self, inputs, results)
        for result in results.values():
            np.multiply(result, 2, out=result)

    monkeypatch.setattr(executor.BoundSession, "run", twice)
    with pytest.raises(VerificationError, match=r"traced, all 2 layers give the reference's hidden states over 47 tok"):
        compile_it(folder)


@full
def test_a_model_that_cannot_be_run_layer_by_layer_is_refused_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaAttention, "forward", scaled_where_traced(1))

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no layers here")

    monkeypatch.setattr("llmc.compiler.verification.layers.layers_of", broken)
    with pytest.raises(VerificationError, match=r"disagree .*could not be found \(RuntimeError: no layers here\)"):
        compile_it(folder)


def test_a_layer_that_lets_padding_in_is_found_by_its_nan_fill(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        built: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return built + x.mean(1, keepdim=True) * (x.shape[0] > 1)

    monkeypatch.setattr(LlamaMLP, "forward", mixed)
    assert "after layer 0 of 0 … 1" in first_difference(open_checkpoint(folder), 24)


@pytest.mark.parametrize("architecture", tiny.REPRESENTATIVES)
def test_a_model_that_is_right_differs_in_no_layer(architecture: str, tmp_path: Path) -> None:
    said = first_difference(open_checkpoint(tiny.write_model(tmp_path / "model", architecture)), 24)
    assert said.startswith("traced, all ") and "over 24 tokens" in said
