"""GGUF files of every architecture that has a form there, as llama.cpp's converters write them.

`gguf_converted.json` has the metadata and the shapes of such files. tests/oracles/test_gguf.py writes it, and compares
the values of the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmc.artifacts.store.store import Store
from llmc.compiler.architectures.shared.architectures import architecture, by_gguf_architecture
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend.consumed import require_consumed, tensor_names
from llmc.compiler.frontend.skeleton import model_config
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.errors import CheckpointError
from tests.compiler import tiny
from tests.compiler.checkpoint.writers import add_metadata, finish
from tests.tiers import default_cases, full

RECORDED = Path(__file__).parents[1] / "data" / "gguf_converted.json"
CONVERTED: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
NO_MEANING = frozenset({
    "dtype", "torch_dtype", "_name_or_path", "transformers_version", "architectures", "bos_token_id", "eos_token_id",
    "pad_token_id", "initializer_range", "initializer_factor", "use_cache", "router_aux_loss_coef",
    "max_position_embeddings", "max_window_layers", "head_dim", "block_multiple_of", "num_ln_in_parallel_attn",
    "rotary_pct", "chunk_size", "mlp_bias", "layers_block_type",
})  # fmt: skip
"""Members that do not change these models' results. Files of some architectures lack max_position_embeddings. head_dim
follows where a configuration leaves it out."""


def meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers makes of a configuration, without members that change nothing."""
    built = model_config(architecture(config).in_common_terms(config)).to_dict()
    return {key: value for key, value in built.items() if key not in NO_MEANING}


def write(
    path: Path,
    name: str,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    tensors_each: int = 0,
    **changes: Any,
) -> tuple[Path, dict[str, Any]]:
    """A file as it was converted, with random values, and these values by name. Tensors with a part of `types` in their
    name are of that type. `tensors_each`: the most in each part of a split file. `changes` of the metadata; None: left
    out."""
    record, random, values = CONVERTED[name], np.random.default_rng(0), dict[str, Any]()
    writer = gguf.GGUFWriter(path, record["architecture"], split_max_tensors=tensors_each)
    for key, value in ({**record["metadata"], **changes}).items():
        if value is not None:
            add_metadata(writer, key, value)
    for tensor, shape in record["tensors"].items():
        floats = (0.15 * random.standard_normal(shape) + ("norm" in tensor)).astype(np.float32)
        if tensor.endswith("ssm_a") or tensor.startswith("rope_"):  # decays are negative, and divisors positive
            floats = np.exp(floats) * (-1 if tensor.endswith("ssm_a") else 1)
        kind = next((kind for part, kind in (types or {}).items() if part in tensor), None)
        stored = floats if kind is None else gguf.quantize(floats, kind)
        writer.add_tensor(tensor, stored, raw_dtype=kind)
        values[tensor] = floats if kind is None else gguf.dequantize(stored, kind)
    finish(writer)
    return path, values


def test_every_architecture_of_gguf_files_is_recorded() -> None:
    stated = sorted(name for names in by_gguf_architecture().values() for name in names)
    assert stated == sorted(CONVERTED)


@default_cases(14)
@pytest.mark.parametrize("name", CONVERTED)
def test_the_configuration_and_tensors_are_those_of_the_original(name: str, tmp_path: Path) -> None:
    record, found = CONVERTED[name], open_checkpoint(write(tmp_path / "m.gguf", name)[0])
    assert found.config["model_type"] == name
    assert meaning(found.config) == meaning(record["config"])
    require_consumed(found)
    names = {*tensor_names(found.config)}
    assert {*found.tensor_names()} == (names if "output.weight" in record["tensors"] else names - {"lm_head.weight"})
    for tensor in found.tensor_names():
        assert found.tensor(tensor).shape == found.shape(tensor)


Q8 = gguf.GGMLQuantizationType.Q8_0


def test_quantized_experts_keep_their_blocks_with_gate_and_up_of_each_together(tmp_path: Path) -> None:
    path, stored = write(tmp_path / "m.gguf", "qwen3_moe", {"gate_exps": Q8, "up_exps": Q8})
    checkpoint, name = open_checkpoint(path), "model.layers.1.mlp.experts.gate_up_proj"
    gate, up = (stored[f"blk.1.ffn_{part}_exps.weight"] for part in ("gate", "up"))
    expected = np.concatenate([gate, up], axis=1)
    np.testing.assert_array_equal(checkpoint.tensor(name), expected)
    blocks = checkpoint.quantised_blocks(name)
    assert blocks is not None and blocks.matrices == len(expected) == 8
    np.testing.assert_array_equal(blocks.dequantise().reshape(expected.shape), expected)
    for expert, matrix in zip(blocks.apart(), expected, strict=True):
        np.testing.assert_array_equal(expert.dequantise(), matrix)


def test_experts_of_different_types_have_no_blocks(tmp_path: Path) -> None:
    path, stored = write(tmp_path / "m.gguf", "qwen3_moe", {"gate_exps": Q8, "up_exps": gguf.GGMLQuantizationType.Q4_0})
    checkpoint, name = open_checkpoint(path), "model.layers.0.mlp.experts.gate_up_proj"
    assert checkpoint.stored_form(name) is None and checkpoint.quantised_blocks(name) is None
    assert checkpoint.unkept(name) == "GGUF Q8_0"
    expected = np.concatenate([stored[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up")], axis=1)
    np.testing.assert_array_equal(checkpoint.tensor(name), expected)


def test_experts_of_gpt_oss_in_mxfp4_keep_their_blocks(tmp_path: Path) -> None:
    """transformers has them transposed, with gate and up in turn."""
    path, stored = write(tmp_path / "m.gguf", "gpt_oss", {"_exps.weight": gguf.GGMLQuantizationType.MXFP4})
    checkpoint = open_checkpoint(path)
    gate, up = (stored[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up"))
    turned = np.empty((8, gate.shape[2], 2 * gate.shape[1]), np.float32)
    turned[..., ::2], turned[..., 1::2] = gate.swapaxes(1, 2), up.swapaxes(1, 2)
    down = stored["blk.0.ffn_down_exps.weight"].swapaxes(1, 2)
    for part, expected in (("gate_up", turned), ("down", down)):
        name = f"model.layers.0.mlp.experts.{part}_proj"
        np.testing.assert_array_equal(checkpoint.tensor(name), expected)
        assert checkpoint.stored_form(name) is None
        form, blocks = checkpoint.reordered_form(name), checkpoint.reordered_blocks(name)
        assert form is not None and form.turned and blocks is not None
        for expert, matrix in zip(blocks.apart(), expected, strict=True):
            np.testing.assert_array_equal(expert.dequantise().T, matrix)


def test_rows_of_quantized_projections_are_in_the_order_of_falcon(tmp_path: Path) -> None:
    path, stored = write(tmp_path / "m.gguf", "falcon", {"attn_qkv": Q8})
    checkpoint, name = open_checkpoint(path), "transformer.h.0.self_attention.query_key_value.weight"
    heads = stored["blk.0.attn_qkv.weight"].reshape(8, 16, 64)  # 4 queries, 2 keys, 2 values
    expected = heads[[0, 1, 4, 6, 2, 3, 5, 7]].reshape(-1, 64)
    np.testing.assert_array_equal(checkpoint.tensor(name), expected)
    blocks = checkpoint.quantised_blocks(name)
    assert blocks is not None
    np.testing.assert_array_equal(blocks.dequantise(), expected)


def test_parts_of_latent_attention_and_recurrent_layers_are_restored(tmp_path: Path) -> None:
    path, stored = write(tmp_path / "a.gguf", "deepseek_v3")
    keys, values = stored["blk.0.attn_k_b.weight"], stored["blk.0.attn_v_b.weight"]
    joined = open_checkpoint(path).tensor("model.layers.0.self_attn.kv_b_proj.weight").reshape(4, -1, 24)
    np.testing.assert_array_equal(joined[:, :16], keys.swapaxes(1, 2))
    np.testing.assert_array_equal(joined[:, 16:], values)
    path, stored = write(tmp_path / "b.gguf", "mamba")
    found = open_checkpoint(path)
    logs = found.tensor("backbone.layers.0.mixer.A_log")
    np.testing.assert_allclose(-np.exp(logs), stored["blk.0.ssm_a"], rtol=1e-6)
    kernel = found.tensor("backbone.layers.0.mixer.conv1d.weight")
    np.testing.assert_array_equal(kernel[:, 0], stored["blk.0.ssm_conv1d.weight"])


def test_norms_lose_what_llama_cpp_adds_to_them(tmp_path: Path) -> None:
    path, stored = write(tmp_path / "m.gguf", "gemma2")
    found = open_checkpoint(path).tensor("model.layers.0.post_feedforward_layernorm.weight")
    np.testing.assert_allclose(found, stored["blk.0.post_ffw_norm.weight"] - 1, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mamba", {"mamba.ssm.inner_size": None}, "metadata of mamba cannot be read"),
        ("lfm2", {"lfm2.attention.head_count_kv": None}, "metadata of lfm2 cannot be read"),
        ("deepseek_v3", {"deepseek2.rope.dimension_count": None}, r"rope\.dimension_count is missing"),
        ("falcon", {"falcon.attention.head_count_kv": 3}, "do not divide over 3 K/V heads"),
        ("qwen3_moe", {"qwen3moe.expert_count": "many"}, r"qwen3moe\.expert_count is 'many', not a number"),
        ("deepseek_v3", {"deepseek2.block_count": "two"}, "variant of the architecture 'deepseek2' is not supported"),
        (
            "falcon_mamba",
            {"mamba.ssm.dt_b_c_rms": [True, False]},
            "variant of the architecture 'mamba' is not supported",
        ),
        (
            "ernie4_5_moe",
            {"ernie4_5-moe.interleave_moe_layer_step": 0},
            "layers of a ernie4_5_moe model",
        ),
        ("mamba2", {"mamba2.ssm.time_step_rank": [0, 0]}, "metadata mamba2.ssm.time_step_rank|metadata of mamba2"),
        ("glm4_moe", {"glm4moe.nextn_predict_layers": 7}, "layers stated"),
        ("gemma2", {"gemma2.attention.sliding_window_pattern": "x"}, "metadata of gemma2 cannot be read"),
        ("qwen3_moe", {"qwen3moe.expert_weights_scale": 2.5}, "expert_weights_scale is 2.5, which is not supported"),
        ("gpt_oss", {"gpt-oss.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
    ],
)
def test_damaged_metadata_is_refused_by_name(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write(tmp_path / "m.gguf", name, **changes)[0])


def parts(folder: Path) -> list[Path]:
    write(folder / "m.gguf", "llama", tensors_each=8)
    return sorted(folder.glob("*.gguf"))


def test_the_parts_of_a_split_file_are_read_as_one(tmp_path: Path) -> None:
    (tmp_path / "split").mkdir()
    files = parts(tmp_path / "split")
    assert [file.name for file in files] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    whole = open_checkpoint(write(tmp_path / "m.gguf", "llama")[0])
    for opened in (files[0], files[2], tmp_path / "split"):
        found = open_checkpoint(opened)
        assert found.tensor_names() == whole.tensor_names() and found.config == whole.config
        for tensor in whole.tensor_names():
            np.testing.assert_array_equal(found.tensor(tensor), whole.tensor(tensor))
        found.forget()
    assert found.files() == files
    digest = found.digest()
    content = bytearray(files[2].read_bytes())
    content[-1] ^= 1
    files[2].write_bytes(content)
    assert open_checkpoint(files[0]).digest() != digest


def test_a_part_that_is_missing_or_of_another_model_is_named(tmp_path: Path) -> None:
    files = parts(tmp_path)
    saved = files[1].read_bytes()
    files[1].unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf: no such file"):
        open_checkpoint(files[0])
    files[1].write_bytes(files[2].read_bytes())
    with pytest.raises(CheckpointError, match="not part 2 of the split model that m-00001-of-00003"):
        open_checkpoint(files[0])
    files[1].write_bytes(saved)
    alone = files[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match=r"one of 3 parts of a split model; name the parts NAME-00001-of-00003"):
        open_checkpoint(alone)


def test_the_two_lists_of_factors_of_phi_3_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata is what llama.cpp's conversion/phi.py writes for Phi-3-mini-128k."""
    tensors = {"rope_factors_long.weight": [4], "rope_factors_short.weight": [4]}
    monkeypatch.setitem(CONVERTED["phi3"], "tensors", CONVERTED["phi3"]["tensors"] | tensors)
    changes = {"phi3.rope.scaling.original_context_length": 32, "phi3.rope.scaling.attn_factor": 1.25}
    path, stored = write(tmp_path / "m.gguf", "phi3", **changes)
    found = open_checkpoint(path).config
    assert found["original_max_position_embeddings"] == 32
    rope = found["rope_parameters"]
    assert (rope["rope_type"], rope["attention_factor"], rope["factor"]) == ("longrope", 1.25, 4.0)
    assert rope["partial_rotary_factor"] == 0.5
    for kind in ("long", "short"):
        np.testing.assert_allclose(rope[f"{kind}_factor"], stored[f"rope_factors_{kind}.weight"], rtol=1e-6)


@full
@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("deepseek_v3", "onnxruntime"), ("falcon", "onnxruntime"), ("gemma2", "xla"), ("gpt_bigcode", "onnxruntime"),
        ("granitemoehybrid", "onnxruntime"), ("mamba2", "openvino"), ("phi3", "onnxruntime"),
    ],
)  # fmt: skip
def test_a_file_compiles_and_every_bucket_gives_what_transformers_gives(name: str, device: str, tmp_path: Path) -> None:
    path, _ = write(tmp_path / "m.gguf", name)
    options = CompileOptions(device, quantize="none", verify="all")
    result = compile_bundle(
        str(path), tmp_path / "b", tiny.kinds_plan(), options, Store(tmp_path / "s"), lambda _: None
    )
    assert result.verification["buckets"] == len(tiny.kinds_plan().buckets)
    assert result.verification["mean_kl"] < 1e-5
