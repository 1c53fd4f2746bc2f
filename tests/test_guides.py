"""The offline examples of vendors' vLLM guides, with the import changed: same calls, same names, same fields."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

import llmc
from llmc.testing.toy import write_toy


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    return write_toy(tmp_path / "toy", positions=128)


def test_the_lpu_guides_example(model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("NUM_LPU_DEVICES", "2")
    bundle = model.with_name("bundle")
    llmc.compile(model, bundle, device="fake", max_model_len=64, max_num_seqs=1)
    LLM, SamplingParams = llmc.LLM, llmc.SamplingParams
    logger = logging.getLogger("guide")

    prompts = ["Hello, my name is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, top_k=1, min_tokens=30, max_tokens=30)
    llm = LLM(model=str(bundle))
    outputs = llm.generate(prompts, sampling_params)
    with caplog.at_level(logging.INFO, "guide"):
        for output in outputs:
            prompt = output.prompt
            generated_text = output.outputs[0].text
            logger.info(f"Prompt:    {prompt!r}")
            logger.info(f"Output:    {generated_text!r}")
    assert "Prompt:    'Hello, my name is'" in caplog.text
    assert len(outputs[0].outputs[0].token_ids) == 30


def test_the_neuron_guides_example(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With what was compiled before in NEURON_COMPILED_ARTIFACTS, as the guide deploys it."""
    compiled = tmp_path / "neuron-compiled-artifacts"
    llmc.compile(model, compiled, device="fake", max_model_len=128, max_num_seqs=4)
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(compiled))
    monkeypatch.setenv("VLLM_NEURON_FRAMEWORK", "neuronx-distributed-inference")
    assert os.environ["VLLM_NEURON_FRAMEWORK"]
    LLM, SamplingParams = llmc.LLM, llmc.SamplingParams

    prompts = [
        "The president of the United States is",
        "The capital of France is",
        "The future of AI is",
    ]
    sampling_params = SamplingParams(top_k=1)
    llm = LLM(
        model=str(model),
        max_num_seqs=4,
        max_model_len=128,
        override_neuron_config={
            "enable_bucketing": False,
        },
        device="neuron",
        tensor_parallel_size=32,
    )
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
    assert [output.prompt for output in outputs] == prompts
    assert all(1 <= len(output.outputs[0].token_ids) <= 16 for output in outputs)
    assert "tensor_parallel_size=32 has no effect" in caplog.text
