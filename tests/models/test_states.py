"""Families with states, from a folder to texts: by Gaudi's portable programs, whose executor holds any cache."""

from __future__ import annotations

from pathlib import Path

import llmc
from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.runtime.engine.sampling import SamplingParams
from llmc.runtime.llm import BundleLLM
from tests.compiler import tiny
from tests.models.texts import NEW, PROMPTS, continued


def test_every_bucket_is_verified_and_greedy_tokens_are_transformers_own(stateful: str, tmp_path: Path) -> None:
    """Buckets with a context continue states that the bundle's own prompt graphs made, since no state can be cut."""
    model = tiny.write_model(tmp_path / "model", stateful)
    options = CompileOptions("hpu", quantize="none", verify="all")
    path = tmp_path / "bundle"
    result = compile_bundle(str(model), path, tiny.tiny_plan(), options, Store(tmp_path / "store"), lambda _: None)
    assert result.verification is not None
    assert result.verification["max_abs"] < 1e-3
    assert result.verification["leak"] < 1e-4
    assert result.verification["greedy_equal"] == result.verification["greedy_sequences"] > 0
    with BundleLLM(path, threads=1) as llm:
        made = llm.generate(list(PROMPTS), SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in made] == continued(stateful)


def test_a_model_that_keeps_states_alone_runs_by_a_plan_without_contexts(tmp_path: Path) -> None:
    model = str(tiny.write_model(tmp_path / "model", "mamba2"))
    plan = llmc.plan(model, max_model_len=64, max_num_seqs=2, block_size=32)
    assert {bucket.context for bucket in plan.buckets} == {0}
    path = tmp_path / "bundle"
    result = llmc.compile(
        model, path, plan=plan, device="hpu", quantize="none", verify="all", cache_dir=tmp_path / "store"
    )
    assert result.verification is not None
    assert result.verification["max_abs"] < 1e-3
    assert result.verification["longest"] > 32, "beyond the largest query"
    with BundleLLM(path, threads=1) as llm:
        made = llm.generate(list(PROMPTS), SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in made] == continued("mamba2")
