"""The offline examples of vendors' vLLM guides, with the import changed: same calls, same names, same fields."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

import llmc
from llmc.testing.toy import write_toy
from tests.compiler import tiny
from tests.hyperdex import CASE, LpuHost, lpu
from tests.tiers import default_cases

__all__ = ["lpu"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    return write_toy(tmp_path / "toy", positions=128)


@default_cases(1)
@pytest.mark.parametrize("gpus", [None, "2"])
def test_the_lpu_guides_example(
    gpus: str | None, lpu: LpuHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`NUM_LPU_DEVICES=2 …` and `NUM_GPU_DEVICES=2 NUM_LPU_DEVICES=2 …`, over the fake HyperDex."""
    monkeypatch.setenv("LLMC_CACHE_DIR", str(lpu.store.root))
    monkeypatch.setenv("LLMC_HYPERDEX_PYTHON", str(lpu.settings.hyperdex_python))
    monkeypatch.setenv("NUM_LPU_DEVICES", "2")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if gpus is not None:
        monkeypatch.setenv("NUM_GPU_DEVICES", gpus)
    LLM, SamplingParams = llmc.LLM, llmc.SamplingParams
    logger = logging.getLogger("guide")

    prompts = ["Hello, my name is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, top_k=1, min_tokens=30, max_tokens=30)
    llm = LLM(model=str(lpu.model))
    outputs = llm.generate(prompts, sampling_params)
    with caplog.at_level(logging.INFO, "guide"):
        for output in outputs:
            prompt = output.prompt
            generated_text = output.outputs[0].text
            logger.info(f"Prompt:    {prompt!r}")
            logger.info(f"Output:    {generated_text!r}")
    assert "Prompt:    'Hello, my name is'" in caplog.text
    tokens = outputs[0].outputs[0].token_ids
    assert len(tokens) == 30 and tokens == penalised(outputs[0].prompt_token_ids, 30)
    manifest = llm.bundle.manifest
    assert (manifest.executor, manifest.device, manifest.options["devices"]) == ("lpu", "lpu", 2)
    assert manifest.verification["by"] == "tokens"
    llm.close()


def penalised(prompt: list[int], count: int) -> list[int]:
    """The reference's best tokens under the guide's repetition_penalty, which its example leaves at 1.2."""
    tokens = list(prompt)
    for _ in range(count):
        logits = tiny.logits(CASE, tokens)[-1].copy()
        for token in set(tokens):
            logits[token] = logits[token] / 1.2 if logits[token] > 0 else logits[token] * 1.2
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


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
    assert "tensor_parallel" in caplog.text and "override_neuron_config" in caplog.text, "what differs is told"
