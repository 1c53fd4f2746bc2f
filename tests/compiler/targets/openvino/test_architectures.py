"""Families whose layers or caches are unlike Llama's, as one paged model, from a folder to texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions, UnfitError
from llmc.compiler.pipeline.compile import CompileResult, compile_bundle
from llmc.compiler.targets import open_target
from llmc.compiler.targets.openvino.target import default_dtype
from llmc.errors import ArtifactError, InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_sized
from llmc.runtime.executors.base import Executor
from llmc.runtime.llm import BundleLLM
from llmc.runtime.step import ragged
from llmc.testing.executors import close
from tests.compiler import tiny
from tests.manifests import edit_manifest
from tests.models.texts import NEW, PROMPTS, continued
from tests.tiers import full

pytestmark = full

ARCHITECTURES = ("deepseek_v3", "gemma2", "gemma4_text", "granitemoehybrid", "mamba", "mamba2", "qwen3_5_text")
PLAIN = {"gemma2": {"attention"}, "mamba": {"states"}}
"""What plain operators run, over rows of one length."""
HYBRID = "qwen3_5_text"

Compile = Callable[..., CompileResult]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compile a tiny model for openvino; the same again comes from the store."""
    folder = tmp_path_factory.mktemp("families")

    def compile_(case: str, device: str = "openvino", **options: Any) -> CompileResult:
        model = folder / case
        if not model.exists():
            tiny.write_model(model, case)
        bundle = folder / f"{case}-{len(list(folder.iterdir()))}"
        requested = CompileOptions.of(device, **{"quantize": "none", **options})
        return compile_bundle(str(model), bundle, tiny.kinds_plan(), requested, Store(folder / "store"), lambda _: None)

    return compile_


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_every_bucket_is_verified_and_greedy_tokens_are_transformers_own(compiled: Compile, case: str) -> None:
    """Prompts of three lengths share steps with each other and with decode."""
    result = compiled(case, verify="all")
    found = result.verification
    assert found["mean_kl"] < 1e-9
    assert found["leak"] == 0.0
    assert found["greedy_equal"] == found["greedy_sequences"] > 0
    with BundleLLM(result.bundle, threads=1) as llm:
        built = llm.generate(list(PROMPTS), SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in built] == continued(case)
    assert result.analysis.get("plain", {}).keys() == PLAIN.get(case, set())
    said = open_target("openvino").describe(result.analysis) if result.analysis else []
    assert all("of 2 layers by OpenVINO's plain operators: " in line for line in said)


@pytest.mark.parametrize("case", ["gemma4_text", HYBRID])
def test_models_of_one_shape_are_verified_too(compiled: Compile, case: str) -> None:
    found = compiled(case, "openvino:NPU", verify="all").verification
    assert found["mean_kl"] < 1e-9
    assert found["leak"] == 0.0
    assert found["greedy_equal"] == found["greedy_sequences"] > 0


@pytest.mark.parametrize("case", [HYBRID, "mamba"])
def test_fixed_decode_batches_and_starters_give_the_same_tokens(compiled: Compile, case: str) -> None:
    """States go from the starter's executor to the tables; a step of a row less has a row of no slot's states."""
    result = compiled(case, verify="none", specialise=True, specialise_memory=1 << 30, starter=True)
    with BundleLLM(result.bundle, threads=1, keep_steps=True) as llm:
        first = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
        llm.executor.open_all()
        built = llm.generate(list(PROMPTS), SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True))
        assert any(record.executable.startswith("decode batch=") for record in llm.records)
    assert [output.outputs[0].token_ids for output in built] == continued(case)
    assert list(first[0].outputs[0].token_ids) == list(continued(case)[0][:3])


def test_narrow_values_and_caches_of_several_sizes_may_be_in_eight_bits(compiled: Compile) -> None:
    for case in ("deepseek_v3", "gemma4_text"):
        found = compiled(case, verify="all", kv_cache_dtype="u8").verification
        assert found["mean_kl"] < 1e-3
        assert found["leak"] == 0.0


@pytest.mark.parametrize("narrow", [False, True], ids=["f32", "bf16"])
def test_a_soft_cap_reads_its_cache_in_float32_and_says_so(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch, narrow: bool
) -> None:
    """Whatever the CPU computes in by default."""
    monkeypatch.setattr("llmc.compiler.targets.openvino.target.computes_in", lambda *_: narrow)
    monkeypatch.setattr("llmc.compiler.targets.openvino.target.require_precision", lambda *_: None)
    result = compiled("gemma2", quantize="int8", verify="none")
    assert Bundle.open(result.bundle).manifest.options["dtype"] == "f32"
    assert Bundle.open(result.bundle).manifest.options["kv_cache_dtype"] == "f32"
    assert "scores with a soft cap have no paged form in OpenVINO" in result.choice
    with pytest.raises(UnfitError, match=r"read a KV cache in f32; use --kv-cache-dtype f32"):
        compiled("gemma2", quantize="int8", verify="none", kv_cache_dtype="u8")


def test_states_are_in_float32_wherever_the_rest_is_in_bfloat16(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, where a CPU computes in it; asked for, it is an error."""
    monkeypatch.setattr("llmc.compiler.targets.openvino.target.computes_in", lambda *_: True)
    monkeypatch.setattr("llmc.compiler.targets.openvino.target.require_precision", lambda *_: None)
    assert default_dtype("int8") == "bf16"
    result = compiled(HYBRID, quantize="int8", verify="none")
    assert Bundle.open(result.bundle).manifest.options["dtype"] == "f32"
    assert "layers with recurrent state are computed in float32" in result.choice
    with pytest.raises(UnfitError, match="use --dtype f32"):
        compiled(HYBRID, quantize="int8", dtype="bf16", verify="none")


@pytest.fixture
def executor(compiled: Compile, request: pytest.FixtureRequest) -> Executor:
    """Slots full of NaN."""
    built = open_sized(Bundle.open(compiled(HYBRID, verify="none").bundle), slots=4, capacity=48, threads=1)
    request.addfinalizer(built.close)
    for slot in range(4):
        built.nan_fill(slot, 0, float("nan"))
    return built


def after(tokens: list[int]) -> np.ndarray:
    row: np.ndarray = tiny.logits(HYBRID, tokens)[-1]
    return row


def test_states_go_with_their_tokens_through_any_slots(executor: Executor) -> None:
    """Rows in any slots and order, of several lengths; copies of all tokens; slots that begin again."""
    first, second = [5, 6, 7], [8, 9]
    rows = executor.run(ragged("prompt", [2, 0], [first, second], [0, 0]))
    assert close(rows[0], after(first))
    assert close(rows[1], after(second))
    executor.copy_prefix(2, 3, 3)
    rows = executor.run(ragged("prompt", [3, 0, 2], [[10], [11, 12, 13], [14]], [3, 2, 3]))
    for row, tokens in zip(rows, ([*first, 10], [*second, 11, 12, 13], [*first, 14]), strict=False):
        assert close(row, after(tokens))
    kept = executor.export_prefix(3, 4)
    executor.run(ragged("decode", [2], [[21]], [0]))
    executor.nan_fill(1, 0, float("nan"))
    for one, other in zip(executor.export_prefix(3, 4), kept, strict=True):
        np.testing.assert_array_equal(one, other)
    assert close(executor.run(ragged("decode", [2], [[22]], [1]))[0], after([21, 22]))


def test_a_token_is_not_taken_back_out_of_a_state(executor: Executor) -> None:
    executor.run(ragged("prompt", [0], [[1, 2, 3]], [0]))
    for call in (
        lambda: executor.copy_prefix(0, 1, 2), lambda: executor.export_prefix(0, 2),
        lambda: executor.run(ragged("decode", [0], [[4]], [2])),
    ):  # fmt: skip
        with pytest.raises(InputError, match="slot 0 holds the states after 3 tokens"):
            call()
    with pytest.raises(InputError, match="its model has recurrent state"):
        executor.import_prefix(1, executor.export_prefix(0, 3))


def test_memory_counts_the_states_of_slots_that_hold_tokens(executor: Executor) -> None:
    empty = executor.memory()
    executor.run(ragged("prompt", [0], [[1, 2, 3]], [0]))
    state = 4 * (4 * 96 + 4 * 16 * 8)
    block = executor.capabilities.block_tokens * 4 * 2 * 2 * 16
    assert executor.memory()["cache"] - empty["cache"] == state + block
    assert empty["cache_pool"] == 4 * (state + 2 * block)


def test_a_manifest_of_other_states_is_refused(compiled: Compile) -> None:
    bundle = Path(compiled(HYBRID, verify="none").bundle)

    def widen(document: dict[str, Any]) -> None:
        document["model"]["cache"][1]["shape"][0] += 1

    edit_manifest(bundle, widen)
    with pytest.raises(ArtifactError, match="is not a graph of the sizes that the manifest states"):
        open_sized(Bundle.open(bundle), slots=1, capacity=48, threads=1)
