"""Every family on ONNX Runtime, from a checkpoint folder to text: one trace, one compile in float32."""

from __future__ import annotations

from pathlib import Path

from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.llm import BundleLLM
from tests.compiler import tiny
from tests.models.texts import NEW, PROMPTS, continued


def test_logits_of_ragged_nan_filled_batches_and_greedy_tokens_are_transformers_own(
    architecture: str, tmp_path: Path
) -> None:
    model = tiny.write_model(tmp_path / "model", architecture)
    options = CompileOptions("onnxruntime", quantize="none", verify="all")
    store, path = Store(tmp_path / "store"), tmp_path / "bundle"
    result = compile_bundle(str(model), path, tiny.tiny_plan(), options, store, lambda _: None)
    assert result.verification["max_abs"] < 1e-3
    assert result.verification["leak"] < 1e-4
    assert result.verification["top1"] == 1.0
    assert result.verification["greedy_equal"] == result.verification["greedy_sequences"] > 0
    with BundleLLM(path, threads=1) as llm:
        built = llm.generate(list(PROMPTS), SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in built] == continued(architecture)
