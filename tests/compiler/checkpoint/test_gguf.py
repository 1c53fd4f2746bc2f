"""GGUF files: config, tensors, blocks, damage; and the demo model."""

from __future__ import annotations

import random
import re
import struct

import gguf
import numpy as np
import pytest

from llmc.compiler.checkpoint import open_checkpoint, read_config
from llmc.compiler.checkpoint.gguf_file import TENSOR_TYPES, read_header
from llmc.errors import CheckpointError
from tests.compiler.checkpoint.writers import (
    BLOCK_KINDS,
    CONFIG,
    HEAD,
    HIDDEN,
    KV_HEADS,
    TOKENS,
    gguf_values,
    interleave,
    weights,
    write_blocks,
    write_gguf,
)

Q_PROJ, K_PROJ = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"


def test_tensors_are_those_of_transformers(tmp_path):
    checkpoint, expected = open_checkpoint(write_gguf(tmp_path / "m.gguf")), weights()
    assert checkpoint.tensor_names() == sorted(expected)
    for name, value in expected.items():
        assert checkpoint.shape(name) == value.shape
        np.testing.assert_array_equal(checkpoint.tensor(name), value)
        assert checkpoint.quantised_blocks(name) is None


def test_qwen2_keeps_row_order_and_has_biases(tmp_path):
    expected = weights(llama=False)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", expected, arch="qwen2", tokenizer={"pre": "qwen2"}))
    assert checkpoint.config["architectures"] == ["Qwen2ForCausalLM"]
    for name, value in expected.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), value)


def test_config_builds_the_right_transformers_config(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    config = read_config(path)
    assert config == open_checkpoint(path).config
    for key, value in CONFIG.items():
        if key != "rope_theta":
            assert config[key] == value, key
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["head_dim"] == HEAD and config["pad_token_id"] is None


def test_an_output_matrix_unties_the_embeddings(tmp_path):
    tensors = weights() | {"lm_head.weight": np.ones((len(TOKENS), HIDDEN), np.float32)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in checkpoint.tensor_names()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_model_built_from_it_computes_what_the_original_does(tmp_path, arch):
    """End to end through transformers: config, names and the row order that rotary embedding depends on."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {key: value for key, value in CONFIG.items() if key not in ("model_type", "architectures", "rope_theta")}
    if arch == "qwen3":
        sizes["head_dim"] = HEAD
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **sizes)).eval()
    tensors = {name: value.numpy().copy() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, arch=arch, tokenizer={"pre": "qwen2"}))
    again = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config)).eval()
    values = {name: torch.from_numpy(checkpoint.tensor(name).copy()) for name in checkpoint.tensor_names()}
    missing = again.load_state_dict(values, strict=False)
    assert missing.unexpected_keys == [] and missing.missing_keys in ([], ["lm_head.weight"])
    again.tie_weights()
    ids = torch.tensor([[2, 3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_types_match_gguf_py(tmp_path, kind):
    path = write_gguf(tmp_path / "m.gguf", types={"proj.weight": kind})
    checkpoint = open_checkpoint(path)
    for name in (Q_PROJ, K_PROJ, "model.layers.0.mlp.down_proj.weight"):
        quantisation = gguf.GGMLQuantizationType[kind]
        heads = {Q_PROJ: 4, K_PROJ: KV_HEADS}.get(name)
        original = weights()[name]
        stored = interleave(original, heads) if heads else original
        values = gguf.dequantize(gguf.quantize(stored, quantisation), quantisation)
        found = checkpoint.tensor(name)
        np.testing.assert_array_equal(interleave(found, heads) if heads else found, values)
        assert found.dtype == np.float32 and found.flags.c_contiguous
        assert np.abs(found - original).max() < 0.5


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks_follow_their_formula_and_are_gguf_py_s_values_to_the_bit(tmp_path, kind):
    """Of random bytes, rows of q and k in transformers' order."""
    values = write_blocks(tmp_path / "m.gguf", {"": kind})
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    for name in (n for n in checkpoint.tensor_names() if "norm" not in n):
        form, blocks = checkpoint.stored_form(name), checkpoint.quantised_blocks(name)
        rows, columns = checkpoint.shape(name)
        assert (blocks.type, blocks.bits, blocks.block) == (form.type, form.bits, form.block)
        assert form.type == kind and checkpoint.unkept(name) is None
        assert blocks.q.shape == (rows, columns // form.block, form.block)
        assert blocks.scale.shape == (rows, columns // form.block)
        assert int(blocks.q.max()) < 2**blocks.bits
        lowest, highest = int(blocks.q.min()), int(blocks.q.max())
        assert form.offsets or blocks.zero_point == 2 ** (form.bits - 1)
        assert blocks.zero_point == lowest or not form.offsets
        if "IQ4" not in kind:
            assert lowest + highest == 2**form.bits - 1, "about the middle"
        formula = blocks.scale[..., None] * (blocks.q.astype(np.float32) - blocks.zero_point)
        assert (form.offsets == "minimums") == (blocks.minimum is not None)
        if form.offsets:
            formula = formula + blocks.minimum[..., None]
        held = blocks.scale.astype(np.float16).astype(np.float32)
        assert (form.scales == "float16") == bool((held == blocks.scale).all())
        np.testing.assert_array_equal(formula.reshape(rows, columns), values[name])
        np.testing.assert_array_equal(blocks.dequantise(), values[name])
        np.testing.assert_array_equal(checkpoint.tensor(name), values[name])


@pytest.mark.parametrize("kind", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0"])
def test_types_without_blocks_that_a_device_multiplies_are_floats(tmp_path, kind):
    name = "model.layers.0.mlp.down_proj.weight"
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    data = np.full((64, size), 17, np.uint8)
    path = write_gguf(
        tmp_path / "m.gguf", weights() | {name: data}, types={"layers.0.mlp.down_proj": kind},
    )  # fmt: skip
    checkpoint = open_checkpoint(path)
    assert checkpoint.stored_form(name) is checkpoint.quantised_blocks(name) is None
    assert checkpoint.unkept(name) == f"GGUF {kind}"
    np.testing.assert_array_equal(checkpoint.tensor(name), gguf_values(kind, data))


def test_the_type_table_is_that_of_gguf_py():
    for number, (label, block, size) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (label, block, size)


def test_llama3_rope_is_recovered_from_its_frequency_factors(tmp_path):
    inverse = 5e5 ** -(np.arange(0, HEAD, 2) / HEAD)
    factors = []
    for frequency in inverse:
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / 32 + smooth))
    raw = {"rope_freqs.weight": np.array(factors, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", extra={"llama.rope.freq_base": 5e5}, raw=raw)
    assert read_config(path)["rope_parameters"] == {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert "rope_freqs.weight" not in open_checkpoint(path).tensor_names()
    raw["rope_freqs.weight"][0] = 3.0
    with pytest.raises(CheckpointError, match="does not follow the Llama 3 rule"):
        read_config(write_gguf(tmp_path / "n.gguf", extra={"llama.rope.freq_base": 5e5}, raw=raw))


def test_linear_and_yarn_scaling(tmp_path):
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    rope = read_config(write_gguf(tmp_path / "l.gguf", extra=linear))["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
    rope = read_config(write_gguf(tmp_path / "y.gguf", extra=yarn | {"llama.rope.scaling.original_context_length": 64}))
    assert rope["rope_parameters"] == {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.expert_count": 8, "llama.expert_used_count": 2}, r"ffn_\w+.weight is unknown in architecture llama"),
        (
            {"llama.attention.sliding_window": 4096},
            "sliding_window is 4096, which is not supported",
        ),
        ({"llama.rope.dimension_count": 8}, "8 of 16 values of each head is not supported"),
        ({"llama.attention.value_length": 8}, "different head size"),
        ({"llama.block_count": 3}, "3 layers stated, tensors of 2 found"),
        ({"llama.embedding_length": 128}, "token_embd.weight has 64 columns"),
        ({"llama.attention.head_count": 8}, "attn_k.weight has 32 rows, which are not 2 heads"),
        ({"llama.attention.head_count_kv": 3}, "do not divide over 3"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"split.count": 2}, r"one of 2 parts of a split model; name the parts NAME-00001-of-00002\.gguf"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "a positive number is needed"),
        ({"llama.context_length": "many"}, "an integer of at least 1 is needed"),
        ({"general.alignment": 48}, "not a power of two"),
    ],
)
def test_what_is_not_supported_or_contradicts_is_refused(tmp_path, extra, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", extra=extra))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attn_logit_softcapping", 50.0), ("llama.final_logit_softcapping", 30.0), ("llama.attention.scale", 0.2),
        ("llama.logit_scale", 0.5), ("llama.residual_scale", 0.22), ("llama.rope.scale_linear", 2.0),
        ("llama.rope.scaling.attn_factor", 0.7), ("llama.rope.scaling.yarn_beta_fast", 16.0),
        ("llama.attention.causal", False), ("llama.use_parallel_residual", True), ("llama.nextn_predict_layers", 1),
        ("adapter.type", "lora"),
    ],
)  # fmt: skip
def test_metadata_that_nothing_reads_is_refused_by_name(tmp_path, key, value):
    with pytest.raises(CheckpointError, match=f"metadata {re.escape(key)}"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", extra={key: value}))


def test_metadata_that_says_what_is_done_anyway_is_no_matter(tmp_path):
    notes = {
        "llama.rope.scaling.finetuned": True, "llama.vocab_size": 999, "llama.rope.scale_linear": 1.0,
        "llama.attention.causal": True, "general.url": "x", "quantize.imatrix.chunks_count": 7,
        "somebody.note": 3,
    }  # fmt: skip
    assert open_checkpoint(write_gguf(tmp_path / "m.gguf", extra=notes)).config["model_type"] == "llama"


def test_scaled_positions_without_a_type_are_refused(tmp_path):
    """What wrote the file means linear scaling; it may not be taken for none."""
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.factor scales positions"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", extra={"llama.rope.scaling.factor": 4.0}))


def test_an_unknown_architecture_lists_the_known(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", arch="rwkv7", tokenizer={"pre": None})
    with pytest.raises(CheckpointError, match=r"'rwkv7' is not supported in GGUF files; .* Hugging Face folder"):
        open_checkpoint(path)


def test_missing_metadata_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", drop=("llama.context_length",))
    with pytest.raises(CheckpointError, match=r"context_length is missing"):
        read_config(path)


def test_a_tensor_without_a_place_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", raw={"blk.0.surprise.weight": np.ones(4, np.float32)})
    with pytest.raises(CheckpointError, match=r"blk\.0\.surprise\.weight is unknown in architecture llama"):
        open_checkpoint(path)


def test_a_non_finite_value_is_named(tmp_path):
    tensors = weights()
    tensors["model.norm.weight"][3] = np.nan
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds a non-finite value"):
        checkpoint.tensor("model.norm.weight")


def test_a_damaged_scale_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", types={"down_proj": "Q4_1"})
    info = read_header(path).tensors["blk.0.ffn_down.weight"]
    data = bytearray(path.read_bytes())
    data[info.offset : info.offset + 2] = struct.pack("<e", float("inf"))
    path.write_bytes(data)
    checkpoint = open_checkpoint(path)
    for ask in (checkpoint.tensor, checkpoint.quantised_blocks):
        with pytest.raises(CheckpointError, match=r"mlp\.down_proj\.weight.* non-finite"):
            ask("model.layers.0.mlp.down_proj.weight")


def test_the_digest_is_of_the_content(tmp_path):
    (tmp_path / "other").mkdir()
    first, second = write_gguf(tmp_path / "a.gguf"), write_gguf(tmp_path / "other" / "b.gguf")
    assert open_checkpoint(first).digest() == open_checkpoint(second).digest()
    assert open_checkpoint(first).files() == [first]
    third = write_gguf(tmp_path / "c.gguf", weights(seed=1))
    assert open_checkpoint(first).digest() != open_checkpoint(third).digest()


def test_special_tokens_template_and_generation_config(tmp_path):
    extra = {
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.ggml.eot_token_id": 1,
        "general.name": "Tiny",
    }
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", extra=extra))
    assert checkpoint.name == "Tiny"
    assert checkpoint.special_tokens() == {"bos_token": "<|user|>", "eos_token": "<|end|>"}
    assert checkpoint.chat_template() == "{{ messages }}"
    assert checkpoint.generation_config() == {
        "bos_token_id": 1,
        "eos_token_ids": [0, 1],
        "pad_token_id": None,
    }


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF", "truncated or damaged: the version"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian GGUF is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "truncated or damaged"),
    ],
)
def test_what_is_no_gguf_is_refused(tmp_path, data, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_a_git_lfs_pointer_is_named_as_such(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(CheckpointError, match=r"m\.gguf: a Git LFS pointer"):
        open_checkpoint(path)


def test_truncations_are_refused(tmp_path):
    whole, path = write_gguf(tmp_path / "w.gguf").read_bytes(), tmp_path / "cut.gguf"
    header = read_header(tmp_path / "w.gguf")
    data = min(info.offset for info in header.tensors.values())
    last = max(info.offset + info.bytes for info in header.tensors.values())
    for size in [*range(0, data, 7), *range(data, last, 4001), last - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read_header(path)
    path.write_bytes(whole[:last])
    read_header(path)


def test_damaged_headers_are_refused_or_read(tmp_path):
    """Bits flipped and bytes replaced anywhere in the header: no other exception, no endless loop."""
    tensors = {name: value[:, :32] if value.ndim == 2 else value for name, value in weights().items()}
    source = write_gguf(
        tmp_path / "w.gguf", tensors, extra={"llama.embedding_length": 32, "llama.attention.key_length": 16}
    )
    open_checkpoint(source)
    whole, path, draw = source.read_bytes(), tmp_path / "bad.gguf", random.Random(11)
    data = min(info.offset for info in read_header(source).tensors.values())
    opened = 0
    for round_ in range(1500):
        damaged = bytearray(whole)
        at = draw.randrange(4, data)
        damaged[at] = damaged[at] ^ (1 << draw.randrange(8)) if round_ % 2 else draw.choice((0, 1, 127, 128, 255))
        path.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(path)
            opened += 1
            checkpoint.special_tokens(), checkpoint.generation_config(), checkpoint.chat_template()
            checkpoint.tensor("model.norm.weight")
            checkpoint.tensor(K_PROJ)
            checkpoint.tokenizer_json()
        except CheckpointError:
            pass
    assert opened > 50


@pytest.mark.real_weights
def test_the_demo_model():
    checkpoint = open_checkpoint("smollm2-demo")
    assert checkpoint.name == "smollm2-demo" and len(checkpoint.tensor_names()) == 272
    expected = {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 1,
        "eos_token_id": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    }  # fmt: skip
    assert {key: checkpoint.config[key] for key in expected} == expected
    assert checkpoint.special_tokens()["eos_token"] == "<|im_end|>"
    assert checkpoint.generation_config()["eos_token_ids"] == [2]


@pytest.mark.real_weights
def test_rows_of_the_demo_model_by_hand():
    """Q4_1 and Q8_0 rows from the file's bytes in plain Python; the q row permuted by its definition."""
    checkpoint = open_checkpoint("smollm2-demo")
    header = read_header(checkpoint.path)

    def row(name: str, index: int) -> list[float]:
        info = header.tensors[name]
        size = 20 if info.type == "Q4_1" else 34
        width = info.shape[1] // 32 * size
        data = header.file.read(info.offset + index * width, width, "a row")
        values = []
        for block in (data[at : at + size] for at in range(0, width, size)):
            if info.type == "Q4_1":
                scale, least = struct.unpack("<ee", block[:4])
                quantized = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
                values += [scale * code + least for code in quantized]
            else:
                (scale,) = struct.unpack("<e", block[:2])
                values += [scale * code for code in struct.unpack("<32b", block[2:])]
        return values

    def close(found, expected):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)

    close(checkpoint.tensor("model.layers.7.mlp.down_proj.weight")[100], row("blk.7.ffn_down.weight", 100))
    close(checkpoint.tensor("model.embed_tokens.weight")[504], row("token_embd.weight", 504))
    q = checkpoint.tensor("model.layers.3.self_attn.q_proj.weight")
    close(q[5 * 64 + 10], row("blk.3.attn_q.weight", 5 * 64 + 20))  # head 5, first half
    close(q[5 * 64 + 32 + 10], row("blk.3.attn_q.weight", 5 * 64 + 21))  # its partner in the second half
    blocks = checkpoint.quantised_blocks("model.layers.3.self_attn.q_proj.weight")
    np.testing.assert_array_equal(blocks.dequantise(), q)
