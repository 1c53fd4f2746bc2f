"""Caches that are not of keys and values of one size, from a folder to texts: by portable programs, whose executor
holds any, and on the accelerators of vendors, of which there are fakes."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmc
from llmc.artifacts.store.store import Store
from llmc.buckets.bucket import Bucket
from llmc.buckets.capture.memory import profile
from llmc.buckets.capture.options import CaptureOptions
from llmc.buckets.plan import Plan
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import CompileResult, compile_bundle
from llmc.compiler.targets.xla import target as xla
from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.base import Executor
from llmc.runtime.executors.inductor import executor as inductor
from llmc.runtime.executors.whole_step.executor import AcceleratorExecutor, AcceleratorGraphs
from llmc.runtime.llm import BundleLLM
from llmc.runtime.step import pad
from tests.compiler import tiny
from tests.compiler.targets.xla.unoptimised import unoptimised
from tests.fakes import cuda, gaudi
from tests.models.texts import NEW, PROMPTS, continued
from tests.tiers import default_cases, full

GREEDY = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
STATES = "qwen3_5_text"
ARRAYS = {
    STATES: ["state f32 [1, slots, 3, 96]", "state f32 [1, slots, 4, 16, 8]", "kv f32 [2, slots, 49, 2, 16]"],
    tiny.SIZES: ["kv f32 [2, slots, 16, 2, 16]", "kv f32 [2, slots, 49, 1, 32]"],
}
"""How the cache of a tiny model lies on a card; a window of 5 tokens has a ring of 16 places."""


class Bundles:
    """The bundle of each family for each device, made when it is asked for first; a model is traced once for all."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._store = folder, Store(folder / "store")
        self.results: dict[Path, CompileResult] = {}

    def of(self, case: str, device: str, verify: str = "none", plan: Plan | None = None) -> Path:
        path, model = self._folder / f"{case}-{device}", self._folder / case
        if path not in self.results:
            if not model.exists():
                tiny.write_model(model, case)
            options = CompileOptions(device, "none", verify=verify)
            self.results[path] = compile_bundle(
                str(model), path, plan or tiny.tiny_plan(), options, self._store, lambda _: None
            )
        return path


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    return Bundles(tmp_path_factory.mktemp("caches"))


@default_cases("lfm2")
def test_every_bucket_is_verified_and_greedy_tokens_are_transformers_own(stateful: str, bundles: Bundles) -> None:
    """Buckets with a context continue states that the bundle's own prompt graphs made, since no state can be cut."""
    path = bundles.of(stateful, "hpu", verify="all")
    result = bundles.results[path]
    assert result.verification is not None
    assert result.verification["max_abs"] < 1e-3
    assert result.verification["leak"] < 1e-4
    assert result.verification["greedy_equal"] == result.verification["greedy_sequences"] > 0
    with BundleLLM(path, threads=1) as llm:
        built = llm.generate(list(PROMPTS), GREEDY)
    assert [output.outputs[0].token_ids for output in built] == continued(stateful)


@full
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
        built = llm.generate(list(PROMPTS), GREEDY)
    assert [output.outputs[0].token_ids for output in built] == continued("mamba2")


# cards


def install(device: str, patch: pytest.MonkeyPatch) -> None:
    """A host with a card, in the mode that captures graphs."""
    if device == "hpu":
        gaudi.install(patch, lazy=True, FAKE_HPU_MEMORY=str(24 << 20))
    else:
        cuda.install(patch, memory=128 << 20)
        patch.setattr(inductor, "whole_graph", lambda run: run)


def prepare(executor: Executor) -> None:
    """Capture every bucket, where graphs are, and fill all slots with NaN."""
    if graphs := executor.capabilities.graph_device:
        for bucket in executor.bundle.plan.buckets:
            graphs.capture(bucket)
    for slot in range(executor.slots):
        executor.nan_fill(slot, 0, float("nan"))


@full
@pytest.mark.parametrize("case", ARRAYS)
@pytest.mark.parametrize("device", ["hpu", "inductor"])
def test_graphs_captured_on_a_accelerator_give_the_same_tokens(
    case: str, device: str, bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundles.of(case, device)
    install(device, monkeypatch)
    with BundleLLM(path, threads=1) as llm:
        executor = llm.executor
        assert isinstance(executor, AcceleratorExecutor)
        prepare(executor)
        built = llm.generate(list(PROMPTS), GREEDY)
        assert [str(array) for array in executor._cache.arrays] == ARRAYS[case]
    assert [output.outputs[0].token_ids for output in built] == continued(case)


@full
@pytest.mark.parametrize("case", ARRAYS)
def test_neurons_modules_give_the_same_tokens(case: str, bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over rings of 16 places, not of a multiple of 128, which is longer than the plan's sequences."""
    monkeypatch.setattr(xla, "CAPACITY_MULTIPLE", 8)
    with unoptimised(), BundleLLM(bundles.of(case, "neuron", plan=tiny.kinds_plan()), threads=1) as llm:
        prepare(llm.executor)
        built = llm.generate(list(PROMPTS), GREEDY)
        assert bool(llm.bundle.cache_shape.rewind.rings) == (case != STATES)
    assert [output.outputs[0].token_ids for output in built] == continued(case)


@pytest.fixture(params=["hpu", "inductor"])
def opened(request: pytest.FixtureRequest, bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> AcceleratorExecutor:
    """The model with states on a card, with four slots."""
    path = bundles.of(STATES, request.param)
    install(request.param, monkeypatch)
    executor = open_executor(Bundle.open(path), slots=4, threads=1)
    request.addfinalizer(executor.close)
    assert isinstance(executor, AcceleratorExecutor)
    return executor


@full
def test_a_slot_is_copied_with_its_states_and_only_whole(opened: AcceleratorExecutor) -> None:
    """The copy goes on as the slot would have, though dummy rows read the first row's slot meanwhile."""
    prepare(opened)
    prompt, decode = Bucket("prompt", 3, 8, 0), Bucket("decode", 3, 1, 48)
    tokens = PROMPTS[0][:7]
    opened.run(pad(prompt, [0], [tokens], [0]))
    for use in (opened.export_prefix, lambda slot, length: opened.copy_prefix(slot, 2, length)):
        with pytest.raises(InputError, match="slot 0 holds the states after 7 tokens"):
            use(0, 4)
    opened.copy_prefix(0, 2, len(tokens))
    for slot in (0, 2):
        logits = opened.run(pad(decode, [slot], [[7]], [len(tokens)]))[0]
        assert logits == pytest.approx(tiny.logits(STATES, [*tokens, 7])[-1], abs=1e-4)
    for got, wanted in zip(*(opened.export_prefix(slot, 8) for slot in (0, 2)), strict=True):
        assert (got == wanted).all()


@full
def test_memory_holds_the_sequences_that_it_is_divided_into_with_their_states(opened: AcceleratorExecutor) -> None:
    graphs = opened.capabilities.graph_device
    assert isinstance(graphs, AcceleratorGraphs)
    memory = profile(graphs, opened.bundle.plan, graphs.block_bytes, CaptureOptions())
    graphs.allocate(memory.blocks)
    each, held = 4 * (2 * 49 * 2 * 16 + 3 * 96 + 4 * 16 * 8), opened.memory()["cache"]
    assert held == opened.slots * each
    assert memory.kv_reserved - 2 * each < held <= memory.kv_reserved
