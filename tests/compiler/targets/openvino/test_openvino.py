"""OpenVINO on CPU, end to end: tiny models of every architecture, one paged model for all buckets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.artifacts.bundle.manifest import STARTER_NAME
from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import CompileResult, compile_bundle
from llmc.compiler.targets.openvino import target as openvino_target
from llmc.compiler.targets.openvino.target import OpenVinoTarget
from llmc.errors import ArtifactError, DeviceError, InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.cache_shape import CacheShape
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.openvino.blocks import BLOCK, block_bytes
from llmc.runtime.executors.openvino.device import properties_for
from llmc.runtime.executors.openvino.executor import held_bytes
from llmc.runtime.llm import BundleLLM
from llmc.testing.toy import toy_plan
from tests.compiler import tiny
from tests.manifests import edit_manifest
from tests.tiers import default_cases, full

PLAN = toy_plan()
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPTS = [list(range(3, 3 + n)) for n in (9, 1, 14, 4)]

Compile = Callable[..., CompileResult]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compile a tiny model for openvino; the same again comes from the store."""
    folder = tmp_path_factory.mktemp("openvino")

    def compile_(case: str = "llama", **options: Any) -> CompileResult:
        model = folder / case
        if not model.exists():
            tiny.write_model(model, case)
        bundle = folder / f"{case}-{len(list(folder.iterdir()))}"
        requested = CompileOptions.of("openvino", **{"quantize": "none", **options})
        return compile_bundle(str(model), bundle, PLAN, requested, Store(folder / "store"), lambda _: None)

    return compile_


@default_cases(1)
@pytest.mark.parametrize("case", [*tiny.REPRESENTATIVES, *tiny.VARIANTS, "cohere", "gpt2", "gptj", "mixtral"])
def test_every_architecture_is_exact_in_float32(compiled: Compile, case: str) -> None:
    """Ragged batches, chunks over a past, sliding windows and poisoned blocks: each bucket, against transformers."""
    found = compiled(case, verify="all").verification
    assert found["mean_kl"] < 1e-9
    assert found["top1"] == 1.0
    assert found["leak"] == 0.0
    assert found["greedy_equal"] == found["greedy_sequences"]


def test_one_executable_serves_every_bucket_and_prompts_share_steps_with_decode(compiled: Compile) -> None:
    result = compiled(verify="none")
    with BundleLLM(result.bundle, threads=1, keep_steps=True) as llm:
        together = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY)]
        assert len(llm.bundle.manifest.executables) == 1
        assert all(record.padding_tokens == 0 for record in llm.records)
        mixed = [r for r in llm.records if r.phase == "prompt" and len(r.requests) > 1]
        assert mixed, "several sequences took part in a prompt step"
        alone = [list(llm.generate([p], GREEDY)[0].outputs[0].token_ids) for p in PROMPTS]
        assert llm.compilations == 0
    assert together == alone


def test_what_the_toolchain_compiles_at_open_is_counted_apart_from_serving(compiled: Compile) -> None:
    result = compiled(verify="none")
    with BundleLLM(result.bundle, threads=1) as llm:
        llm.generate([PROMPTS[0]], GREEDY)
        assert llm.compilations == 0
        assert llm.compilations_at_open == ("any",)
    with BundleLLM(result.bundle, threads=1) as again:
        assert again.compilations_at_open == ("any",), "what another opened does not count"


@full
def test_two_compiles_in_two_processes_make_the_same_bytes(compiled: Compile, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from llmc.artifacts.store.store import Store\n"
        "from llmc.compiler.options import CompileOptions; from llmc.compiler.pipeline.compile import compile_bundle\n"
        "from llmc.testing.toy import toy_plan\n"
        "from tests.compiler import tiny\n"
        "compile_bundle(sys.argv[1], Path(sys.argv[2]), toy_plan(), CompileOptions('openvino', 'int8', verify='none'),"
        " Store(Path(sys.argv[3])), lambda _: None)\n"
    )
    here = compiled(quantize="int8", verify="none")
    model = tiny.write_model(tmp_path / "llama", "llama")
    there = tmp_path / "there"
    subprocess.run([sys.executable, "-c", code, str(model), str(there), str(tmp_path / "store")], check=True)
    manifests = [Bundle.open(path).manifest for path in (here.bundle, there)]
    assert manifests[0].files["weights"] == manifests[1].files["weights"]
    assert [e.blob for e in manifests[0].executables] == [e.blob for e in manifests[1].executables]


def test_a_cache_in_bf16_without_arithmetic_in_bf16_is_refused(compiled: Compile) -> None:
    with pytest.raises(InputError, match="in f32 reads no KV cache in bf16; with --dtype f32 it reads u8, f32"):
        compiled(kv_cache_dtype="bf16", verify="none")


def test_a_smaller_kv_cache_is_close(compiled: Compile) -> None:
    found = compiled(quantize="int8", kv_cache_dtype="u8").verification
    assert found["mean_kl"] < 0.02
    assert found["leak"] == 0.0


@full
def test_weights_may_share_scales_in_smaller_groups_which_is_closer(compiled: Compile) -> None:
    rows, groups = compiled(quantize="int8", group_size=0), compiled(quantize="int8", group_size=32)
    assert groups.verification["accuracy"]["mean_kl"] < rows.verification["accuracy"]["mean_kl"]
    assert Bundle.open(groups.bundle).manifest.options["group_size"] == 32


@full
def test_activations_may_stay_as_they_are(compiled: Compile) -> None:
    options = Bundle.open(compiled(quantize="int8", activation_group_size=0).bundle).manifest.options
    assert options["activation_group_size"] == 0
    assert options["properties"]["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == "0"


def test_groups_that_are_the_default_are_those_of_a_compile_that_names_none(compiled: Compile) -> None:
    named = compiled(quantize="int4", group_size=32, activation_group_size=32, verify="none")
    manifests = [Bundle.open(r.bundle).manifest for r in (named, compiled(quantize="int4", verify="none"))]
    assert manifests[0].options == manifests[1].options
    assert [e.key for e in manifests[0].executables] == [e.key for e in manifests[1].executables]


def quantised_in(properties: dict[str, str]) -> int:
    return int(properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"])


@full
def test_int8_has_groups_for_the_shape_unless_one_is_named(compiled: Compile) -> None:
    requested = {"quantize": "int8", "specialise": True, "specialise_memory": 1 << 30, "verify": "none"}
    mixed, named = (Bundle.open(compiled(**requested, **more).bundle) for more in ({}, {"group_size": 0}))
    assert quantised_in(mixed.manifest.options["properties"]) == 64
    assert [quantised_in(properties_for(mixed.manifest.options, rows)) for rows in (1, 2, 3, 64)] == [0, 0, 32, 32]
    assert {quantised_in(properties_for(named.manifest.options, rows)) for rows in (None, 1, 2, 3, 64)} == {32}
    sizes = [[held_bytes(b.files.read(e.blob)) for e in b.manifest.executables] for b in (mixed, named)]
    assert sizes[0][0] != sizes[0][1] == sizes[0][2], "scales of groups of 64, and of rows"
    assert max(sizes[1]) - min(sizes[1]) < 64, "the same weights; a constant of the form more or less"
    with BundleLLM(mixed, threads=1, keep_steps=True) as llm:
        llm.executor.open_all()
        assert llm.executor.memory()["open_executables"] == len(mixed.manifest.executables)
        llm.generate(PROMPTS, GREEDY)
        assert {r.executable.split()[0] for r in llm.records} == {"any", "decode"}


def test_auto_computes_int8_in_bf16_where_the_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    target = OpenVinoTarget()
    for features, expected in ((("avx512_bf16",), "bf16"), (("avx2",), "f32")):
        monkeypatch.setattr(openvino_target, "cpu_features", lambda f=features: f)
        chosen = {q: target.configure(CompileOptions("openvino", q)).dtype for q in target.description.quantisations}
        assert chosen == {"none": "f32", "int8": expected, "int4": "f32", "keep": "f32"}
        assert target.configure(CompileOptions("openvino", "int8", "f32")).dtype == "f32"


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ({"group_size": 48}, r"does not offer int8 in groups of 48; it offers int8 in groups of 0, 32, 64, 128; int4"),
        ({"quantize": "none", "group_size": 32}, r"does not offer none in groups of 32"),
        (
            {"group_size": 32, "activation_group_size": 64},
            r"activations in groups of 64 over weights in int8 in groups of 32; it offers 0, 16, 32 \(0: not at all\)",
        ),
        ({"quantize": "none", "activation_group_size": 32}, r"groups of 32 over weights in none; it offers 0 \(0: not"),
    ],
)
def test_groups_that_are_not_offered_list_those_that_are(
    compiled: Compile, requested: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        compiled(**{"quantize": "int8", **requested})


@full
def test_executables_of_fixed_decode_batches_give_the_same_tokens(compiled: Compile) -> None:
    plain, fixed = compiled(verify="none"), compiled(verify="all", specialise=True)
    batches = {b.batch for b in PLAN.decode}
    with BundleLLM(fixed.bundle, threads=1, keep_steps=True) as llm:
        llm.executor.open_all()
        assert llm.executor.memory()["open_executables"] == 1 + len(batches)
        got = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY)]
        assert any(r.executable.startswith("decode batch=") for r in llm.records)
    with BundleLLM(plain.bundle, threads=1) as llm:
        assert got == [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY)]


def test_the_memory_budget_decides_how_many_fixed_executables_open(compiled: Compile) -> None:
    result = compiled(verify="none", specialise=True, specialise_memory=0)
    with BundleLLM(result.bundle, threads=1) as llm:
        llm.executor.open_all()
        assert llm.executor.memory()["open_executables"] == 1


@full
def test_a_starter_serves_until_the_paged_model_is_open_and_hands_over_what_is_cached(compiled: Compile) -> None:
    plain, started = compiled(verify="none"), compiled(starter=True)
    assert STARTER_NAME in Bundle.open(started.bundle).manifest.files
    with BundleLLM(plain.bundle, threads=1) as llm:
        wanted = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY)]
    with BundleLLM(started.bundle, threads=1) as llm:
        opened: list[int] = []
        got: list[list[int]] = [[] for _ in PROMPTS]
        for index, update, _ in llm.stream(PROMPTS, GREEDY):
            got[index] += update.token_ids
            opened.append(llm.executor.memory()["open_executables"])
        llm.executor.open_all()
        assert opened[0] == 0, "the first token came from the starter"
        assert llm.executor.memory()["open_executables"] == 1
        again = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY)]
    assert got == wanted
    assert again == wanted


def test_a_bundle_of_another_openvino_or_cpu_is_refused_with_what_to_do(compiled: Compile) -> None:
    bundle = Path(compiled(verify="none").bundle)
    edit_manifest(bundle, lambda m: m["toolchain"].update(openvino="2025.1.0"))
    with pytest.raises(
        ArtifactError, match=r"compiled with OpenVINO 2025\.1\.0, this host has .*; install openvino==2025"
    ):
        BundleLLM(bundle)
    edit_manifest(bundle, lambda m: m["toolchain"].update(openvino=__import__("openvino").__version__.split("-")[0]))
    edit_manifest(bundle, lambda m: m.update(isa=[*m["isa"], "amx_int8_of_tomorrow"]))
    with pytest.raises(ArtifactError, match="compiled for another CPU; this host is without amx_int8_of_tomorrow"):
        BundleLLM(bundle)


@pytest.mark.parametrize("kind", ["GPU", "NPU", "GPU.1"])
def test_a_device_that_is_not_here_is_named_with_what_is(compiled: Compile, kind: str) -> None:
    from llmc.runtime.executors.openvino.device import require_device

    with pytest.raises(DeviceError, match=rf"OpenVINO finds no {kind} on this host; it finds CPU"):
        require_device(kind)


def test_an_unknown_device_lists_the_known_ones() -> None:
    from llmc.compiler.targets import open_target

    with pytest.raises(InputError, match=r"openvino:TPU.*CPU, GPU, NPU"):
        open_target("openvino:TPU")


def test_a_process_that_serves_imports_neither_torch_nor_the_compiler(compiled: Compile) -> None:
    bundle = compiled(verify="none").bundle
    code = (
        "import sys; from llmc.runtime.llm import BundleLLM; from llmc.runtime.engine.sampling import SamplingParams\n"
        f"llm = BundleLLM({bundle!r}, threads=1)\n"
        "print(llm.generate([[3, 4, 5]], SamplingParams(max_tokens=3, temperature=0))[0].outputs[0].token_ids)\n"
        "assert not {'torch', 'transformers', 'onnx', 'llmc.compiler'} & set(sys.modules), 'too much'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("(", "[").replace(")", "]"))


def test_kv_cache_space_that_holds_no_sequence_says_what_would_fit(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = compiled(verify="none").bundle
    monkeypatch.setenv("VLLM_OPENVINO_KVCACHE_SPACE", "0.000001")
    with pytest.raises(InputError, match=r"holds no sequence: 32 tokens take .* GiB hold one of \d+ tokens"):
        BundleLLM(bundle)
    monkeypatch.setenv("VLLM_OPENVINO_KVCACHE_SPACE", "plenty")
    with pytest.raises(InputError, match="VLLM_OPENVINO_KVCACHE_SPACE='plenty' is not a size in GiB"):
        BundleLLM(bundle)


def test_a_small_kv_cache_space_is_shared_and_refuses_a_prompt_beyond_it(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmc.runtime.executors.openvino.paged_cache import GIB

    bundle = compiled(verify="none").bundle
    two_blocks = 2 * block_bytes("f32", CacheShape.plain(2, 2, 16).kv)
    monkeypatch.setenv("VLLM_OPENVINO_KVCACHE_SPACE", repr((two_blocks + 1) / GIB))
    with BundleLLM(bundle, threads=1) as llm:
        if llm.executor.capacity * llm.executor.slots > 2 * BLOCK:
            assert llm.executor.capabilities.cache_tokens == 2 * BLOCK
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [6] * len(PROMPTS)


def test_damaged_models_are_refused_by_name(compiled: Compile) -> None:
    from llmc.runtime.executors.openvino.device import MappedWeights, read_paged

    bundle = Bundle.open(compiled(verify="none").bundle)
    weights = MappedWeights(bundle.files.path("weights"))
    with pytest.raises(ArtifactError, match=r"somewhere: OpenVINO .* cannot read the model"):
        read_paged(b"<net name='torn'", weights, CacheShape.plain(1, 2, 16), "somewhere")


def test_top_logits_come_from_the_graph(compiled: Compile) -> None:
    from llmc.runtime.step import exact
    from llmc.runtime.top_logits import top_of

    bundle = Bundle.open(compiled(sample_top_k=4).bundle)
    executor = open_executor(bundle, threads=1)
    top = executor.run_top(exact("prompt", [0], [PROMPTS[0]], [0]))
    wanted = top_of(executor.logits(), 4)
    np.testing.assert_array_equal(top.ids, wanted.ids)
    np.testing.assert_array_equal(top.values, wanted.values)
    executor.close()
