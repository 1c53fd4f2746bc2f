"""Estimates: each has a source, measurements win, and the published numbers come out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS
from llmc.buckets.bucket import Bucket
from llmc.buckets.cost.bench import Bench, Measurement
from llmc.buckets.limits import Limits
from llmc.buckets.planner.planner import make_plan
from llmc.compiler.architectures.shared.architectures import size_of
from llmc.compiler.architectures.shared.size import ModelSize, Weights
from llmc.compiler.checkpoint.gguf_file import BLOCK_TYPES
from llmc.compiler.estimates.footprint import Footprint
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import open_target
from llmc.errors import ArtifactError, CheckpointError, InputError
from llmc.runtime.cache_shape import CacheShape, CacheTensor, key_value
from llmc.settings import Settings
from tests.toy import Toy

LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
GUIDE = [Bucket("decode", batch, 1, context) for batch in (1, 2, 4) for context in range(128, 2049, 128)]


def footprint(device="hpu", limits=None, bench=None, **options):
    size = ModelSize.of(LLAMA_8B, "config.json")
    target = open_target(device)
    configured = target.configure(CompileOptions.of(device, **options))
    return Footprint(size, target, configured, limits or Limits(2048, 4), bench=bench)


def test_an_8b_model_has_8b_parameters_and_128_kib_of_cache_a_token():
    size = ModelSize.of(LLAMA_8B, "config.json")
    assert size.parameters == pytest.approx(8.03e9, rel=0.001)
    assert size.cache_values * 2 == 128 << 10


def test_graph_memory_is_what_the_gaudi_guide_logged():
    """48 decode graphs: 161.9 MiB. 15 prompt graphs: 14.03 GiB."""
    prompt = [(1, query) for query in range(128, 1025, 128)] + [(2, query) for query in range(128, 641, 128)]
    prompt += [(4, 128), (4, 256)]
    buckets = [Bucket("prompt", batch, query, 0) for batch, query in prompt]
    assert footprint().graph_bytes(GUIDE) == pytest.approx(161.9 * 2**20, rel=0.02)
    assert footprint().graph_bytes(buckets) == pytest.approx(14.03 * 2**30, rel=0.02)


SMOL = {
    "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152, "head_dim": 64,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = [Bucket("prompt", *b) for b in ((4, 256, 0), (1, 128, 0), (1, 256, 256))]
SMALL += [Bucket("decode", batch, 1, 512) for batch in (1, 2, 4)]


def smol(device, **options):
    size = ModelSize.of(SMOL, "config.json")
    target = open_target(device)
    return Footprint(size, target, target.configure(CompileOptions.of(device, **options)), Limits(512, 4))


@pytest.mark.parametrize("device", ["onnxruntime", "xla"])
def test_a_workspace_that_executables_share_is_counted_once(device):
    found = smol(device, quantize="none", specialise=True)
    shared = [found.graph_bytes([bucket]) - found.executable_bytes(bucket) for bucket in SMALL]
    assert min(shared) > 0
    assert found.graph_bytes(SMALL) == sum(map(found.executable_bytes, SMALL)) + max(shared)


@pytest.mark.parametrize(
    ("device", "bucket", "megabytes"),
    [("onnxruntime", SMALL[0], 2.3), ("onnxruntime", SMALL[5], 2.3), ("xla", SMALL[0], 27.3), ("xla", SMALL[5], 38.0)],
)
def test_an_executable_takes_what_was_measured(device, bucket, megabytes):
    """benchmarks/graph_memory.py, float32, on SmolLM2-135M."""
    found = smol(device, quantize="none", specialise=True).executable_bytes(bucket)
    assert found == pytest.approx(megabytes * 1e6, rel=0.15)


@pytest.mark.parametrize(
    ("device", "options", "megabytes"),
    [
        ("openvino", {"quantize": "int8"}, 184.3),
        ("openvino", {"quantize": "int8", "specialise": True}, 515.2),
        ("openvino", {"quantize": "none"}, 587.6),
        ("onnxruntime", {"quantize": "none"}, 556.7),
    ],
)
def test_a_graph_for_every_shape_takes_what_was_measured(device, options, megabytes):
    """The packed weights among it, and the activations of the largest chunk."""
    assert smol(device, **options).graph_bytes(SMALL) == pytest.approx(megabytes * 1e6, rel=0.15)


@pytest.mark.parametrize(("memory", "fixed"), [(0, 0), (210 << 20, 1), (512 << 20, 2), (1 << 30, 3)])
def test_of_models_of_fixed_batches_those_count_that_open_in_their_budget(memory, fixed):
    alone = smol("openvino", quantize="int8").graph_bytes(SMALL)
    found = smol("openvino", quantize="int8", specialise=True, specialise_memory=memory).graph_bytes(SMALL)
    assert round((found - alone) / smol("openvino", quantize="int8").executable_bytes(SMALL[0])) == fixed


def test_126_graphs_take_half_an_hour_on_a_gaudi():
    buckets = [Bucket("prompt", 1, query, 0) for query in range(1, 127)]
    found = footprint(verify="none")
    graphs = found.compile_seconds(buckets) - found.compile_seconds(buckets[:1])
    assert graphs == pytest.approx(29 * 60 * 125 / 126, rel=0.05)


def test_executables_follow_the_devices_static_dimensions():
    assert footprint().executables(GUIDE) == 48
    assert footprint("cpu").executables(GUIDE) == 1
    assert footprint("cpu", specialise=True).executables(GUIDE) == 48


def test_every_estimate_names_its_source():
    found = {estimate.name: estimate for estimate in footprint(dtype="bf16").estimates(GUIDE)}
    assert list(found) == ["executables", "compile time", "weights", "KV cache", "graph memory"]
    assert all(estimate.source for estimate in found.values())
    assert found["weights"].value == pytest.approx(16.06e9, rel=0.001)
    assert found["KV cache"].value == 4 * 2048 * (128 << 10)
    text = footprint().text(GUIDE)
    assert "48 buckets; fixed on this device: batch, query, context" in text
    assert "vllm-gaudi#1160" in text


def test_a_bench_file_wins_over_formulas():
    measured = Bench("hpu", (Measurement(GUIDE[0], 0.01, compile_seconds=2.0, memory_bytes=1000),))
    found = footprint(bench=measured, verify="none")
    assert found.graph_bytes([GUIDE[0]]) == 1000
    assert found.compile_seconds(GUIDE) - found.compile_seconds(GUIDE[:1]) == pytest.approx(47 * 2.0)
    sources = {estimate.name: estimate.source for estimate in found.estimates(GUIDE)}
    assert "measured in the bench file" in sources["compile time"]
    assert sources["graph memory"].startswith("1 of 48 measured in the bench file, else ")


def test_the_stores_own_builds_win_over_published_times(tmp_path):
    toy = Toy.make(tmp_path)
    toy.compile()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    found = Footprint.open(
        str(tmp_path / "config.json"), Limits(32), "fake", Settings(cache_override=str(toy.store.root))
    )
    sources = {estimate.name: estimate.source for estimate in found.estimates(toy.plan.buckets)}
    assert "median of this store's last builds" in sources["compile time"]


def test_a_bundle_gives_its_weights_and_its_own_builds(tmp_path):
    toy = Toy.make(tmp_path)
    toy.compile()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    settings = Settings(cache_override=str(toy.store.root))
    found = Footprint.open(str(tmp_path / "config.json"), Limits(32), "fake", settings, bundle=toy.bundle)
    estimates = {estimate.name: estimate for estimate in found.estimates(toy.plan.buckets)}
    assert estimates["weights"].source == f"as they are in {toy.bundle}"
    assert estimates["weights"].value < 1e6
    assert f"median of the builds of {toy.bundle}" in estimates["compile time"].source
    with pytest.raises(InputError, match="is for device fake, not cpu"):
        Footprint.open(str(tmp_path / "config.json"), Limits(32), "cpu", settings, bundle=toy.bundle)
    with pytest.raises(ArtifactError):
        Footprint.open(str(tmp_path / "config.json"), Limits(32), "fake", settings, bundle=tmp_path / "absent")


def test_a_config_without_sizes_is_named():
    with pytest.raises(CheckpointError, match=r"config\.json: intermediate_size is None, not a size"):
        ModelSize.of({key: value for key, value in LLAMA_8B.items() if key != "intermediate_size"}, "config.json")


def test_a_memory_budget_counts_this_footprint(tmp_path):
    from llmc.compiler.pipeline.planning import plan_for

    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B | {"max_position_embeddings": 4096}))
    budget = 8 * 2**30
    plan = plan_for(str(path), strategy="linear", max_num_seqs=2, device="hpu", max_graph_memory=budget)
    found = footprint(limits=plan.limits).graph_bytes(plan.buckets)
    assert found <= budget
    whole = make_plan(plan.limits, "linear")
    assert len(plan.buckets) < len(whole.buckets)
    assert footprint(limits=plan.limits).graph_bytes(whole.buckets) > budget


DEMO = [
    Weights(106_168_320, BLOCK_TYPES["Q4_1"].form),
    Weights(28_311_552, BLOCK_TYPES["Q8_0"].form, embed_lm_head=True),
]
"""SmolLM2-135M as the demo has it."""


@pytest.mark.parametrize(
    ("device", "quantize", "measured"),
    [
        ("onnxruntime", "keep", 96_938_240), ("onnxruntime", "int4", 96_938_240), ("onnxruntime", "int8", 142_280_960),
        ("openvino", "keep", 105_736_448), ("openvino", "int4", 105_736_448), ("openvino", "int8", 143_405_312),
        ("openvino", "none", 538_315_008),
    ],
)  # fmt: skip
def test_weights_take_what_was_measured(monkeypatch, device, quantize, measured):
    """Sizes of the weights of bundles of the demo model, compiled where the CPU has AVX-512 VNNI and no bfloat16."""
    monkeypatch.setattr("llmc.compiler.targets.onnxruntime.target.cpu_features", lambda: KERNEL_SETS[0].isa)
    target = open_target(device)
    options = target.configure(CompileOptions(device, quantize, dtype="f32"))
    found = Footprint(None, target, options, Limits(256, 2), weights=DEMO)
    assert found.weight_bytes == pytest.approx(measured, rel=0.01)


def test_calibrated_scales_are_float16_for_openvino():
    """SmolLM2-135M on no grid of 4 bits, compiled."""
    weights = [replace(part, stored=None) for part in DEMO]
    target = open_target("openvino")
    options = target.configure(CompileOptions.of("openvino", quantize="int4", calibrate="own"))
    found = Footprint(None, target, options, Limits(256, 2), weights=weights)
    assert found.weight_bytes == pytest.approx(105_736_448, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "openvino", "kernels", "runtimes"),
    [
        ("Q2_K", 4 + 64 / 16, 4 + 32 / 16, 4 + 64 / 16 + 4 + 64 / 16), ("Q3_K", 4 + 64 / 16, 5, 4 + 2 + 4 + 4),
        ("Q4_K", 6, 5, 12), ("Q5_0", 8.5, 6.5, 9 + 10), ("Q5_K", 10, 7, 20), ("Q6_K", 10, 7, 8 + 2 + 8 + 4),
        ("IQ4_XS", 9, 4.5, 19), ("Q8_0", 8.5, 8.5, 19),
    ],
)  # fmt: skip
def test_bits_of_a_weight_are_of_its_blocks(monkeypatch, kind, openvino, kernels, runtimes):
    """Codes, and what each block has beside them: 32 bits a number, 16 in panels and of float16 scales for OpenVINO."""
    monkeypatch.setattr("llmc.compiler.targets.onnxruntime.target.cpu_features", lambda: KERNEL_SETS[0].isa)
    weights = Weights(1, BLOCK_TYPES[kind].form)

    def bits(device, **more):
        options = CompileOptions.of(device, quantize="keep", **more)
        return open_target(device).costs.weight_bits(options, weights)

    assert bits("openvino") == openvino
    assert bits("onnxruntime", kernels="llmc") == kernels
    assert bits("onnxruntime", kernels="onnxruntime") == runtimes


@pytest.mark.parametrize(("quantize", "measured"), [("keep", 227_610_750), ("int8", 313_503_870)])
def test_weights_for_the_runtimes_kernels_are_there_twice(quantize, measured):
    target = open_target("onnxruntime")
    options = target.configure(CompileOptions.of("onnxruntime", quantize=quantize, kernels="onnxruntime"))
    found = Footprint(None, target, options, Limits(256, 2), weights=DEMO)
    assert found.weight_bytes == pytest.approx(measured, rel=0.01)


STATES = (CacheTensor(1, "conv", "state", (8, 3)), CacheTensor(1, "recurrent", "state", (4, 16, 16), dtype="f32"))


def cached(*tensors):
    """The memory of an 8B model with such a cache, in bf16 where a tensor has no dtype of its own."""
    size = replace(ModelSize.of(LLAMA_8B, "config.json"), cache=CacheShape(2, tensors))
    target = open_target("hpu")
    options = target.configure(CompileOptions.of("hpu", dtype="bf16"))
    found = Footprint(size, target, options, Limits(2048, 4))
    return found, {one.name: one for one in found.estimates(GUIDE)}


def test_states_count_once_a_sequence_and_unequal_heads_as_they_are():
    found, estimates = cached(*key_value(0, 2, 24, 16), *STATES)
    assert found.cache_token_bytes == 2 * (2 * 24 + 2 * 16)
    assert estimates["KV cache"].value == 4 * 2048 * found.cache_token_bytes
    assert found.state_bytes == 2 * 8 * 3 + 4 * 4 * 16 * 16
    assert estimates["states"].value == 4 * found.state_bytes
    assert estimates["states"].source == f"4 sequences × {found.state_bytes:,} bytes, for any number of tokens"


def test_a_model_that_keeps_states_alone_has_no_kv_cache_and_a_plain_one_no_states():
    _, estimates = cached(*STATES)
    assert "KV cache" not in estimates and estimates["states"].value == 4 * (48 + 4096)
    assert "states" not in {one.name for one in footprint().estimates(GUIDE)}


def test_a_plain_decoders_cache_is_what_its_sizes_say():
    of_architecture, of_sizes = size_of(LLAMA_8B, "config.json"), ModelSize.of(LLAMA_8B, "config.json")
    assert of_architecture.cache is not None and of_sizes.cache is None
    assert of_architecture.cache_values == of_sizes.cache_values == 2 * 32 * 8 * 128


def test_active_parameters_stand_beside_all_where_there_are_experts():
    mixtral = LLAMA_8B | {
        "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    target = open_target("hpu")
    options = target.configure(CompileOptions.of("hpu"))
    sizes = Footprint(size_of(mixtral, "it"), target, options, Limits(2048, 4))
    weights = next(one for one in sizes.estimates(GUIDE) if one.name == "weights")
    assert weights.source.startswith("46,702.5 M parameters × 32 bits on average; 12,879.7 M active")
    assert "active" not in next(one.source for one in footprint().estimates(GUIDE) if one.name == "weights")
