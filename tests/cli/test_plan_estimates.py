"""`llmc plan MODEL`: what it says that a compile will take, and a dry run says the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.compiler.targets import cpu as cpu_target
from tests.cli.helpers import Llmc
from tests.compiler.checkpoint.writers import write_gguf


def test_estimates_are_of_the_precision_that_is_requested(llmc: Llmc, here: Path) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (here / "config.json").write_text(json.dumps(config))
    limits = ("--config", "config.json", "--max-model-len", 1024, "--max-num-seqs", 1)

    def weights(*flags: object) -> str:
        ran = llmc("plan", *limits, *flags)
        assert ran.code == 0, ran
        return next(line for line in ran.out.splitlines() if line.startswith("weights "))

    plain = weights("--device", "hpu")
    assert "32.12 GB" in plain and "(the config says bfloat16: --dtype bf16 holds half of it)" in plain
    half = weights("--device", "hpu", "--dtype", "bf16")
    assert "16.06 GB" in half and "× 16 bits" in half and "the config says" not in half
    shared = weights("--device", "tpu:v5e-2x2", "--dtype", "bf16", "--tensor-parallel", 4)
    assert "about 4.01 GB on each of 4 devices" in shared
    assert "× 6.39 bits" in weights("--device", "openvino", "--quantize", "int4")
    said = llmc("plan", *limits, "--device", "hpu", "--quantize", "int8").failed(2)
    assert said == "--quantize int8 is not offered for device hpu; offered: none"
    assert "--tensor-parallel" in llmc("plan", *limits, "--device", "hpu", "--tensor-parallel", 2).failed(2)
    assert (
        llmc("plan", "--max-model-len", 64, "--dtype", "bf16")
        .failed(2)
        .startswith("--dtype is for estimates, which need a model")
    )


def test_plan_prices_the_engine_that_a_compile_for_cpu_chooses(
    llmc: Llmc, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One function says what `cpu` stands for; here it is told to say OpenVINO, or ONNX Runtime."""
    write_gguf(here / "model.gguf")
    for engine, executor in (("openvino", "openvino"), ("onnxruntime", "onnxruntime")):
        chosen = cpu_target.EngineChoice(engine, "so it was told")
        monkeypatch.setattr(cpu_target, "choose", lambda *_, chosen=chosen: chosen)
        limits = ("model.gguf", "--max-model-len", 64, "--max-num-seqs", 2)
        planned, dry = llmc("plan", *limits), llmc("compile", *limits, "--dry-run", "--json").json
        named = llmc("compile", *limits, "--device", engine, "--dry-run", "--json").json
        assert dry["estimates"] == named["estimates"]
        assert f"estimated for device cpu ({executor}" in planned.out and "so it was told" in planned.out
        for estimate in dry["estimates"]:
            assert f"  {estimate['source']}\n" in planned.out
