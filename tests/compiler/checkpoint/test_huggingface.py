"""Hugging Face folders: tensors, shards, tokenizer files, digest, damage."""

from __future__ import annotations

import json
import random
import re
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

import llmc
from llmc.compiler.architectures.shared.base import Architecture
from llmc.compiler.architectures.shared.names import Names
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.safetensors_file import SafetensorsFile
from llmc.errors import CheckpointError
from llmc.runtime.text.chat import ChatTemplate
from tests.compiler.checkpoint.writers import CONFIG, weights, write_folder, write_safetensors

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_are_as_written(tmp_path, shards):
    checkpoint, expected = open_checkpoint(write_folder(tmp_path / "m", shards=shards)), weights()
    assert checkpoint.tensor_names() == sorted(expected)
    for name, value in expected.items():
        assert checkpoint.shape(name) == value.shape
        np.testing.assert_array_equal(checkpoint.tensor(name), value)
        assert checkpoint.quantised_blocks(name) is None


def test_every_float_type_becomes_float32(tmp_path):
    value = np.array([[1.5, -2.25, 3e-5], [0.0, -0.0, 65504.0]], np.float32)
    bf16 = (value.view(np.uint32) >> 16).astype("<u2")
    tensors = {
        "f64": ("F64", [2, 3], value.astype("<f8").tobytes()),
        "f32": ("F32", [2, 3], value.tobytes()),
        "f16": ("F16", [2, 3], value.astype("<f2").tobytes()),
        "bf16": ("BF16", [2, 3], bf16.tobytes()),
        "empty": ("F32", [0, 3], b""),
    }
    file = SafetensorsFile(write_safetensors(tmp_path / "a.safetensors", tensors))
    for name in ("f64", "f32", "f16", "bf16"):
        assert file.tensor(name).dtype == np.float32
    np.testing.assert_array_equal(file.tensor("f64"), value)
    np.testing.assert_array_equal(file.tensor("f32"), value)
    np.testing.assert_array_equal(file.tensor("f16"), value.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(file.tensor("bf16"), (value.view(np.uint32) & 0xFFFF0000).view(np.float32))
    assert file.tensor("empty").shape == (0, 3)


def test_bfloat16_matches_ml_dtypes(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    value = np.random.default_rng(0).standard_normal((5, 7)).astype(ml_dtypes.bfloat16)
    file = SafetensorsFile(write_safetensors(tmp_path / "a.safetensors", {"w": ("BF16", [5, 7], value.tobytes())}))
    np.testing.assert_array_equal(file.tensor("w"), value.astype(np.float32))


def test_a_type_without_a_float_reading_is_refused(tmp_path):
    file = SafetensorsFile(write_safetensors(tmp_path / "a.safetensors", {"w": ("F8_E4M3", [2], b"ab")}))
    with pytest.raises(CheckpointError, match="tensor w has type F8_E4M3"):
        file.tensor("w")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_is_named(tmp_path, bad):
    tensors = weights()
    tensors["model.norm.weight"][7] = bad
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", tensors))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds a non-finite value .* at \[7\]"):
        checkpoint.tensor("model.norm.weight")


def test_an_unknown_tensor_is_named(tmp_path):
    checkpoint = open_checkpoint(write_folder(tmp_path / "m"))
    for ask in (checkpoint.tensor, checkpoint.shape, checkpoint.quantised_blocks):
        with pytest.raises(CheckpointError, match="no tensor named 'nope'"):
            ask("nope")


def test_a_missing_shard_is_named(tmp_path):
    path = write_folder(tmp_path / "m", shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 shards are missing: model-00002-of-00003\.safetensors"):
        open_checkpoint(path)


def test_an_index_that_disagrees_with_a_shard_is_refused(tmp_path):
    path = write_folder(tmp_path / "m", shards=2)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks tensor model\.extra\.weight"):
        open_checkpoint(path)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "", 3])
def test_an_index_cannot_point_outside_the_folder(tmp_path, file):
    path = write_folder(tmp_path / "m", shards=2)
    (path / INDEX).write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match="damaged or hostile"):
        open_checkpoint(path)


def test_the_digest_covers_contents_and_not_token_slots(tmp_path):
    first, second = write_folder(tmp_path / "a"), write_folder(tmp_path / "deep" / "b")
    digest = open_checkpoint(first).digest()
    assert digest.startswith("sha256:") and digest == open_checkpoint(second).digest()
    (second / "README.md").write_text("not part of the model")
    assert open_checkpoint(second).digest() == digest
    seen = {digest}
    for file, content in (
        ("tokenizer.json", "{}"),
        ("generation_config.json", "{}"),
        ("chat_template.jinja", "x"),
    ):
        (second / file).write_text(content)
        seen.add(open_checkpoint(second).digest())
    tensors = weights()
    tensors["model.norm.weight"][0] += 1
    seen.add(open_checkpoint(write_folder(tmp_path / "c", tensors)).digest())
    assert len(seen) == 5


def test_the_digest_takes_a_remembering_hash(tmp_path):
    checkpoint, requested = open_checkpoint(write_folder(tmp_path / "a", shards=2)), []
    checkpoint.digest(lambda path: requested.append(path) or "sha256:0")
    assert [path.name for path in requested] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert {path.name for path in checkpoint.files()} == {"config.json", INDEX} | {path.name for path in requested}


def test_the_digest_of_a_config_is_of_its_value(tmp_path):
    path = write_folder(tmp_path / "a", shards=2)
    digest = open_checkpoint(path).digest()
    for file in ("config.json", INDEX):
        members = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps(dict(reversed(members.items())), indent=3))
        assert open_checkpoint(path).digest() == digest
    (path / "config.json").write_text(json.dumps({**CONFIG, "_name_or_path": "/home/someone/model"}))
    assert open_checkpoint(path).digest() == digest, "where it was saved is not what it is"
    (path / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 2e-5}))
    changed = open_checkpoint(path).digest()
    assert changed != digest
    (path / "config.json").write_text(json.dumps({**CONFIG, "note": float("nan")}))
    assert open_checkpoint(path).digest() not in (digest, changed), "JSON without a canonical form counts by its bytes"


def test_tokenizer_template_and_generation_files(tmp_path):
    path = write_folder(tmp_path / "m")
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        checkpoint.tokenizer_json()
    assert checkpoint.chat_template() is None and checkpoint.special_tokens() == {}
    assert checkpoint.generation_config() == {"bos_token_id": 1, "eos_token_ids": [0], "pad_token_id": None}
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    (path / "tokenizer_config.json").write_text(
        json.dumps({
            "bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None,
            "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
        })
    )  # fmt: skip
    (path / "generation_config.json").write_text(
        '{"eos_token_id": [5, 6], "pad_token_id": 0, "temperature": 0.6, "top_p": null, "max_length": 9}'
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.tokenizer_json() == b'{"version": "1.0"}'
    assert checkpoint.special_tokens() == {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(checkpoint.chat_template())
    user = [{"role": "user", "content": "x"}]
    assert template.render(user) == "D" and template.render(user, tools=[{"type": "function"}]) == "T"
    assert checkpoint.generation_config() == {
        "bos_token_id": 1, "eos_token_ids": [5, 6], "pad_token_id": 0, "temperature": 0.6,
    }  # fmt: skip
    (path / "chat_template.jinja").write_text("\nJ\n")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates/tool_use.jinja").write_text("\nU\n")
    template = ChatTemplate(checkpoint.chat_template())
    assert template.render(user) == "\nJ" and template.render(user, tools=[{"type": "function"}]) == "\nU"
    (path / "additional_chat_templates/tool_use.jinja").unlink()
    (path / "tokenizer_config.json").write_text("{}")
    assert open_checkpoint(path).chat_template() == "\nJ\n"


@pytest.mark.parametrize(
    "file",
    ["tokenizer.model", "tokenizer.model.v3", "tekken.json", "qwen.tiktoken", "spiece.model", "vocab.json", "vocab.txt",
     "sentencepiece.bpe.model"],
)  # fmt: skip
def test_a_tokenizer_in_other_files_is_refused_before_anything_is_compiled(tmp_path, file):
    path = write_folder(tmp_path / "m")
    (path / file).write_text("x")
    with pytest.raises(CheckpointError, match=rf"the tokenizer is in {re.escape(file)}, and .*save_pretrained"):
        llmc.compile(str(path), tmp_path / "b", max_model_len=64, device="onnxruntime")
    (path / "tokenizer.json").write_text("{}")
    assert open_checkpoint(path).tokenizer_json() == b"{}"


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_file_that_git_lfs_has_not_fetched_is_named_as_such(tmp_path, file):
    path = write_folder(tmp_path / "m")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 17525357\n"
    (path / file).write_text(pointer)
    with pytest.raises(CheckpointError, match=rf"{re.escape(file)}: a Git LFS pointer .*git lfs pull"):
        checkpoint = open_checkpoint(path)
        checkpoint.chat_template()
        checkpoint.tokenizer_json()


def test_the_end_tokens_of_all_files_end_an_answer(tmp_path):
    """Qwen's base models with a chat template: config.json names <|endoftext|>, the tokenizer <|im_end|>."""
    path = write_folder(tmp_path / "m")
    tokenizer = {"added_tokens": [{"id": 7, "content": "<|im_end|>"}], "model": {"vocab": {"a": 1, "</s>": 3}}}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    for end, ids in (("<|im_end|>", [0, 7]), ("</s>", [0, 3]), ("absent", [0]), (None, [0])):
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        checkpoint = open_checkpoint(path)
        assert checkpoint.generation_config()["eos_token_ids"] == ids
        notice = f"end tokens: 0, and {ids[-1]} ({end!r}), which only the tokenizer names"
        assert checkpoint.notices == ((notice,) if len(ids) > 1 else ())
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    checkpoint = open_checkpoint(path)
    assert checkpoint.generation_config()["eos_token_ids"] == [0, 7] and checkpoint.notices == ()


@pytest.mark.parametrize("shards", [1, 3])
def test_an_unsupported_architecture_is_named_before_weights_are_missed(tmp_path, shards):
    path = write_folder(tmp_path / "m", shards=shards)
    next(path.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"no weights|shards are missing"):
        open_checkpoint(path)
    (path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "seed_oss"}))
    with pytest.raises(CheckpointError, match="architecture 'seed_oss' is not supported"):
        open_checkpoint(path)


def test_of_a_tensor_in_two_shards_the_index_decides(tmp_path):
    path = write_folder(tmp_path / "m", shards=2)
    index = json.loads((path / INDEX).read_text())["weight_map"]
    name = next(tensor for tensor, file in index.items() if file == "model-00001-of-00002.safetensors")
    expected = open_checkpoint(path).tensor(name)
    second = SafetensorsFile(path / "model-00002-of-00002.safetensors").tensors
    held = {n: open_checkpoint(path).tensor(n) for n in second} | {name: expected + 1}
    save_file(held, path / "model-00002-of-00002.safetensors")
    np.testing.assert_array_equal(open_checkpoint(path).tensor(name), expected)


def test_an_empty_weight_file_is_refused(tmp_path):
    path = write_folder(tmp_path / "m")
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"the file is empty \(0 bytes\)"):
        open_checkpoint(path)


def test_every_truncation_is_refused(tmp_path):
    whole = write_safetensors(tmp_path / "w", {"a": ("F32", [4], bytes(16)), "b": ("F16", [3], bytes(6))}).read_bytes()
    path = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            SafetensorsFile(path)


def test_a_flipped_header_bit_is_refused_or_read(tmp_path):
    whole = write_safetensors(tmp_path / "w", {"a": ("F32", [4], bytes(16)), "b": ("F16", [3], bytes(6))}).read_bytes()
    header, path = 8 + struct.unpack("<Q", whole[:8])[0], tmp_path / "bad.safetensors"
    for bit in range(header * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        _reads_or_refuses(path)


def test_random_headers_are_refused_or_read(tmp_path):
    draw, path = random.Random(7), tmp_path / "bad.safetensors"
    entry = '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    for _ in range(500):
        text = bytearray(entry.encode())
        for _ in range(draw.randrange(1, 6)):
            text[draw.randrange(len(text))] = draw.choice(b'{}[]",:0129-eNaI\\\x00\xff')
        path.write_bytes(struct.pack("<Q", len(text)) + bytes(text) + bytes(8))
        _reads_or_refuses(path)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 50_000,
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [1e3], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "b": {"dtype": "F32", "shape": [1], '
        b'"data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {}}',
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 4]}}',
    ],
)
def test_hostile_headers_are_refused(tmp_path, header):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(CheckpointError):
        SafetensorsFile(path)


def _reads_or_refuses(path):
    try:
        file = SafetensorsFile(path)
        for name in file.tensors:
            file.tensor(name)
    except CheckpointError:
        pass


def test_tensors_of_a_checkpoint_without_a_head_and_under_older_names_have_the_models_names() -> None:
    names = Names("transformer.h", stored={"embed_out.weight": "lm_head.weight"})
    assert names.in_full(["h.0.ln.weight", "wte.weight"]) == {
        "transformer.h.0.ln.weight": "h.0.ln.weight", "transformer.wte.weight": "wte.weight",
    }  # fmt: skip
    assert names.in_full(["transformer.h.0.ln.weight", "embed_out.weight"]) == {
        "transformer.h.0.ln.weight": "transformer.h.0.ln.weight", "lm_head.weight": "embed_out.weight",
    }  # fmt: skip


def test_sizes_under_a_familys_own_keys_are_in_common_terms_too() -> None:
    architecture = Architecture(
        model_class="", tiny={}, keys={"hidden_size": "n_embd"},
        derived=lambda config: {"intermediate_size": config.get("n_inner") or 4 * config["hidden_size"]},
    )  # fmt: skip
    common = architecture.in_common_terms({"n_embd": 8})
    assert common == {"n_embd": 8, "hidden_size": 8, "intermediate_size": 32} == architecture.in_common_terms(common)
    with pytest.raises(CheckpointError, match="sizes of a None model cannot be read: KeyError"):
        architecture.in_common_terms({})
