"""The Python surface: `from llmc import LLM, SamplingParams`, plan, compile, Bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import llmc
from llmc import api
from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.store.store import Store
from llmc.compiler.pipeline.compile import ExecutableReport
from llmc.errors import ArtifactError, CheckpointError, InputError
from llmc.testing.toy import EOS, write_toy
from tests.toy import greedy

SMALL: dict[str, Any] = {"device": "fake", "max_model_len": 32, "max_num_seqs": 4}
GREEDY = llmc.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toy checkpoint, beside the folder that LLMC_CACHE_DIR names."""
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    return write_toy(tmp_path / "toy")


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The outcome of every compile in the test."""
    results: list[Any] = []
    compile_ = api.compile
    monkeypatch.setattr(api, "compile", lambda *a, **b: results.append(compile_(*a, **b)) or results[-1])
    return results


def test_everything_public_is_there() -> None:
    assert {"LLM", "AsyncLLM", "Bundle", "SamplingParams", "RequestOutput", "certify", "compile", "plan"} <= set(
        llmc.__all__
    )
    assert set(llmc.__all__) <= set(dir(llmc))
    assert all(getattr(llmc, name) is not None for name in llmc.__all__)
    with pytest.raises(AttributeError, match="module 'llmc' has no attribute 'nothing'"):
        _ = llmc.nothing


def test_plan_takes_ranges_and_limits(toy: Path) -> None:
    plan = llmc.plan(toy, max_model_len=32, max_num_seqs=4, decode_batch=(1, 1, 4))
    assert {bucket.batch for bucket in plan.decode} == {1, 2, 3, 4}
    assert llmc.plan(max_model_len=32).limits.max_model_len == 32
    assert llmc.plan(toy).limits.max_model_len == 64, "what the model says"
    trace = Path(__file__).parents[1] / "data" / "azure_conv_sample.csv"
    chosen = llmc.plan(max_model_len=8192, max_num_seqs=1, traffic=trace, max_graphs=6)
    assert len(chosen.prompt) == 6
    assert chosen.provenance.strategy == "traffic"
    with pytest.raises(InputError, match=r"decode_batch '1,2' is not MIN,STEP,MAX"):
        llmc.plan(toy, decode_batch=(1, 2))
    with pytest.raises(CheckpointError, match="nowhere"):
        llmc.plan("nowhere")


def test_compile_reports_and_returns_what_the_command_prints(toy: Path, tmp_path: Path) -> None:
    seen: list[object] = []
    result = llmc.compile(toy, tmp_path / "bundle", **SMALL, report=seen.append)
    assert (result.built, result.native) == (6, 6)
    assert sum(isinstance(event, ExecutableReport) for event in seen) == 6
    assert llmc.compile(toy, tmp_path / "bundle", **SMALL).built == 0
    assert len(Store(tmp_path / "cache").entries("executable")) == 6, "in the store that LLMC_CACHE_DIR names"


def test_compile_takes_a_plan_and_a_store(toy: Path, tmp_path: Path) -> None:
    plan = llmc.plan(toy, max_model_len=16, max_num_seqs=1)
    llmc.compile(str(toy), str(tmp_path / "bundle"), device="fake", plan=plan, cache_dir=tmp_path / "other")
    assert llmc.Bundle.open(tmp_path / "bundle").plan == plan
    assert not (tmp_path / "cache").exists()


def test_options_of_one_device_are_keywords_too(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--group-size is for cpu, onnxruntime, openvino; leave it out for fake"):
        llmc.compile(toy, tmp_path / "bundle", **SMALL, group_size=64)
    with pytest.raises(InputError, match="--max-memory is for cpu; leave it out for fake"):
        llmc.LLM(str(toy), **SMALL, max_memory=10**9)


def test_an_opened_bundle_shows_what_it_is(toy: Path, tmp_path: Path) -> None:
    llmc.compile(toy, tmp_path / "bundle", **SMALL)
    bundle = llmc.Bundle.open(str(tmp_path / "bundle"))
    assert bundle.manifest.device == "fake"
    assert bundle.plan == llmc.plan(toy, max_model_len=32, max_num_seqs=4)
    assert bundle.eos_token_ids == (EOS,)
    assert bundle.tokenizer.decode(bundle.tokenizer.encode("a river")) == "a river"
    assert bundle.chat_template and "messages" in bundle.chat_template
    with pytest.raises(ArtifactError, match="not a bundle"):
        llmc.Bundle.open(tmp_path / "nowhere")


def test_an_llm_over_a_bundle_compiles_nothing(toy: Path, tmp_path: Path, compiles: list[Any]) -> None:
    llmc.compile(toy, tmp_path / "bundle", **SMALL)
    compiles.clear()
    with llmc.LLM(model=tmp_path / "bundle") as llm:
        (output,) = llm.generate("a river", GREEDY)
        assert llm.compilations == 0
    ids = output.prompt_token_ids
    assert [output.outputs[0].token_ids] == greedy(toy, [ids], 6)
    assert output.prompt == "a river" and output.outputs[0].finish_reason == "length"
    assert compiles == []


def test_an_llm_over_a_checkpoint_compiles_once_and_then_takes_it_from_the_store(
    toy: Path, tmp_path: Path, compiles: list[Any]
) -> None:
    answers = []
    for _ in range(2):
        with llmc.LLM(model=str(toy), **SMALL) as llm:
            answers.append([o.outputs[0].token_ids for o in llm.generate(["a river", "x"], GREEDY)])
    assert [(result.built, result.reused) for result in compiles] == [(6, 0), (0, 6)]
    assert answers[0] == answers[1]
    assert compiles[0].bundle == compiles[1].bundle
    assert Path(compiles[0].bundle).parent == tmp_path / "cache" / "v1" / "bundles", "where `llmc cache gc` finds it"


def test_other_options_are_another_bundle(toy: Path, compiles: list[Any]) -> None:
    for options in ({}, {"specialise": False}, {"max_num_seqs": 2}):
        llmc.LLM(toy, **{**SMALL, **options}).close()
    assert len({result.bundle for result in compiles}) == 3


def test_changed_weights_are_answered_with(toy: Path, compiles: list[Any]) -> None:
    for seed in (0, 1):
        write_toy(toy, seed=seed)
        with llmc.LLM(toy, **SMALL) as llm:
            (output,) = llm.generate([[1, 2, 3]], GREEDY)
        assert [output.outputs[0].token_ids] == greedy(toy, [[1, 2, 3]], 6)
    assert [result.built for result in compiles] == [6, 6]


def test_a_folder_that_holds_one_gguf_is_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def compile_(model: str, *_: object, **__: object) -> None:
        seen.append(model)
        raise CheckpointError("seen")

    monkeypatch.setattr(api, "compile", compile_)
    (tmp_path / "model").mkdir()
    with pytest.raises(ArtifactError, match="not a bundle"):
        llmc.LLM(tmp_path / "model")
    (tmp_path / "model" / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="seen"):
        llmc.LLM(tmp_path / "model")
    assert seen == [str(tmp_path / "model")]


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        llmc.LLM(tmp_path / "nowhere", **SMALL)


def test_prompts_have_parameters_of_their_own(toy: Path) -> None:
    params = [llmc.SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 4)]
    with llmc.LLM(toy, **SMALL) as llm:
        outputs = llm.generate(["a", {"prompt": "b"}], params)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 4]
        with pytest.raises(InputError, match="2 sampling parameters for 1 prompts"):
            llm.generate(["a"], params)


def test_chat_goes_through_the_template(toy: Path) -> None:
    message = {"role": "user", "content": "hi"}
    with llmc.LLM(toy, device="fake", max_num_seqs=2) as llm:
        (one,) = llm.chat([message], GREEDY)
        assert llm.bundle.tokenizer.decode(one.prompt_token_ids) == "user: hi\nassistant:"
        both = llm.chat([[message], [message, {"role": "assistant", "content": "!"}, message]], GREEDY)
        assert both[0].outputs[0].token_ids == one.outputs[0].token_ids
        assert len(both) == 2


def test_sampling_parameters_have_vllms_defaults_and_refuse_nonsense() -> None:
    params = llmc.SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
    assert llmc.SamplingParams(top_k=-1).top_k == 0
    with pytest.raises(InputError, match="max_tokens must be at least 1, not 0"):
        llmc.SamplingParams(max_tokens=0)


def test_steps_are_kept_when_requested(toy: Path) -> None:
    with llmc.LLM(toy, **SMALL, keep_steps=True) as llm:
        (output,) = llm.generate(["a river"], GREEDY)
        manifest = read_manifest(llm.bundle.path)
    assert [step.phase for step in output.steps] == ["prompt", *["decode"] * 5]
    assert {step.executable for step in output.steps} <= {str(e) for e in manifest.executables}


def test_graphs_that_return_the_largest_logits_give_the_same_tokens(toy: Path) -> None:
    params = [
        GREEDY,
        llmc.SamplingParams(max_tokens=6, temperature=0.9, top_k=5, seed=1, ignore_eos=True),
        llmc.SamplingParams(max_tokens=6, temperature=0.9, top_p=0.8, seed=2, ignore_eos=True, logprobs=2),
        llmc.SamplingParams(max_tokens=6, temperature=0.9, repetition_penalty=1.4, seed=3, ignore_eos=True),
    ]
    built = []
    for top_k in (0, 8):
        with llmc.LLM(toy, **SMALL, sample_top_k=top_k) as llm:
            assert llm.executor.bundle.sample_top_k == top_k
            prompts = ["a", "bc", "def", "ghij"]
            built.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
    assert built[0] == built[1]
