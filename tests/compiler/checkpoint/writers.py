"""Writes tiny checkpoints for tests: 2 layers, hidden size 64, 4 query and 2 key/value heads of 16."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, LAYERS = 64, 4, 2, 16, 96, 2
TOKENS = ["<|end|>", "<|user|>", *"abcdefgh", "Ġ", "ab", "Ġa", "cd"]
MERGES = ["a b", "Ġ a", "c d"]


def weights(seed: int = 0, *, llama: bool = True) -> dict[str, np.ndarray]:
    """Tensors under transformers' names."""
    random = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(len(TOKENS), HIDDEN), "model.norm.weight": matrix(HIDDEN)}
    for layer in range(LAYERS):
        rows = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
        block = {f"self_attn.{name}_proj.weight": matrix(count, HIDDEN) for name, count in rows.items()}
        if not llama:
            block |= {f"self_attn.{name}_proj.bias": matrix(count) for name, count in rows.items()}
        block |= {
            "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD),
            "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            "mlp.up_proj.weight": matrix(INNER, HIDDEN),
            "mlp.down_proj.weight": matrix(HIDDEN, INNER),
            "input_layernorm.weight": matrix(HIDDEN),
            "post_attention_layernorm.weight": matrix(HIDDEN),
        }
        tensors |= {f"model.layers.{layer}.{name}": value for name, value in block.items()}
    return tensors


_GGUF_NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    parts = name.split(".")
    if name == "lm_head.weight":
        return "output.weight"
    if parts[1] == "layers":
        return f"blk.{parts[2]}.{_GGUF_NAMES['.'.join(parts[3:-1])]}.{parts[-1]}"
    return f"{_GGUF_NAMES[parts[1]]}.{parts[-1]}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order by its definition: row 2i of a head is transformers' i, row 2i+1 its i + half."""
    size = rows.shape[0] // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return rows[order]


@dataclass(frozen=True)
class _Numbers:
    """Where in a block its float16 numbers lie: the scale, with the largest multiple of it that a weight may be, and
    the minimum, with what of the scale it has to be for weights about zero."""

    scale: int
    largest: int
    minimum: int | None = None
    middle: float = 0


_NUMBERS = {
    "Q4_0": _Numbers(0, 8), "Q4_1": _Numbers(0, 8, 2, -7.5), "Q5_0": _Numbers(0, 16), "Q5_1": _Numbers(0, 16, 2, -15.5),
    "Q8_0": _Numbers(0, 128), "IQ4_NL": _Numbers(0, 128), "IQ4_XS": _Numbers(0, 128 * 32),
    "Q2_K": _Numbers(80, 2 * 15, 82, 1.5), "Q3_K": _Numbers(108, 4 * 32), "Q4_K": _Numbers(0, 8 * 63, 2, 7.5),
    "Q5_K": _Numbers(0, 16 * 63, 2, 15.5), "Q6_K": _Numbers(208, 32 * 128),
}  # fmt: skip
BLOCK_KINDS = tuple(_NUMBERS)


def scale_offsets(kind: str) -> list[int]:
    """Bytes of a block at which its float16 numbers begin."""
    numbers = _NUMBERS[kind]
    return [numbers.scale] if numbers.minimum is None else [numbers.scale, numbers.minimum]


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """A matrix of a type in blocks: bytes are random, scales such that weights are at most 0.2 or so; uint8 [rows,
    bytes of a row]."""
    count, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random, numbers = np.random.default_rng(seed), _NUMBERS[kind]
    built = random.integers(0, 256, (rows, columns // count, size), np.uint8)
    scale = random.uniform(0.1, 0.2, built.shape[:2]) / numbers.largest

    def put(at: int, values: np.ndarray) -> None:
        built[..., at : at + 2] = values.astype(np.float16)[..., None].view(np.uint8)

    put(numbers.scale, scale)
    if numbers.minimum is not None:
        put(numbers.minimum, scale * numbers.middle)
    return built.reshape(rows, -1)


def gguf_values(kind: str, data: np.ndarray) -> np.ndarray:
    """What gguf-py makes of the bytes of a matrix."""
    return gguf.dequantize(data, gguf.GGMLQuantizationType[kind])


def add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A value as metadata of the type that Python's has."""
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    arch: str = "llama",
    types: dict[str, str] | None = None,
    extra: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    raw: dict[str, np.ndarray] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    """A GGUF file; `types`: part of a name to quantisation, of what is not in bytes already;
    `extra`: metadata; `drop`: keys left out."""
    writer = gguf.GGUFWriter(str(path), arch)
    numbers = {
        f"{arch}.context_length": 128, f"{arch}.embedding_length": HIDDEN, f"{arch}.block_count": LAYERS,
        f"{arch}.feed_forward_length": INNER, f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS, f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 0,
    }  # fmt: skip
    for key, value in (numbers | (extra or {})).items():
        if key in drop:
            continue
        add_metadata(writer, key, value)
    vocabulary = {
        "model": "gpt2", "pre": "smollm", "tokens": TOKENS, "merges": MERGES,
        "types": [3, 3] + [1] * (len(TOKENS) - 2),
    }  # fmt: skip
    vocabulary |= tokenizer or {}
    writer.add_tokenizer_model(vocabulary["model"])
    if vocabulary["pre"] is not None:
        writer.add_tokenizer_pre(vocabulary["pre"])
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    if "scores" in vocabulary:
        writer.add_token_scores(vocabulary["scores"])
    else:
        writer.add_token_merges(vocabulary["merges"])
    for name, value in (weights() if tensors is None else tensors).items():
        stored = value
        if arch == "llama" and ".q_proj." in name:
            stored = interleave(value, HEADS)
        if arch == "llama" and ".k_proj." in name:
            stored = interleave(value, KV_HEADS)
        kind = next((label for part, label in (types or {}).items() if part in name), "F32")
        if kind != "F32":
            data = stored if stored.dtype == np.uint8 else gguf.quantize(stored, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored))
    for name, value in (raw or {}).items():
        writer.add_tensor(name, value)
    finish(writer)
    return path


WIDE = 256
"""Inputs of each matrix of `write_blocks`: a block of any type."""


def write_blocks(path: Path, kinds: dict[str, str], **more: Any) -> dict[str, np.ndarray]:
    """A GGUF file of one layer whose matrices are random blocks, of a kind by a part of their name; returns the values
    that gguf-py makes of them, by transformers' names."""
    rows = {"embed_tokens": len(TOKENS), "k_proj": WIDE // 2, "v_proj": WIDE // 2}
    tensors, values = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for seed, name in enumerate(sorted(n for n in weights() if "layers.1" not in n)):
        if "norm" in name:
            tensors[name] = values[name] = np.ones(WIDE, np.float32)
            continue
        kind = next(label for part, label in kinds.items() if part in name)
        height = next((count for part, count in rows.items() if part in name), WIDE)
        tensors[name] = random_blocks(kind, height, WIDE, seed)
        values[name] = gguf_values(kind, tensors[name])
    sizes = {"llama.embedding_length": WIDE, "llama.block_count": 1, "llama.feed_forward_length": WIDE}
    write_gguf(path, tensors, types={"norm": "F32", **kinds}, extra=sizes, **more)
    return values


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": len(TOKENS),
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 0,
}  # fmt: skip


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> Path:
    """A .safetensors file from (type, shape, bytes), written from the format's description."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def write_folder(path: Path, tensors: dict[str, np.ndarray] | None = None, *, shards: int = 1) -> Path:
    """A Hugging Face folder, its weights written by the safetensors library."""
    from safetensors.numpy import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    values = weights() if tensors is None else tensors
    if shards == 1:
        save_file(values, path / "model.safetensors")
        return path
    names, where = sorted(values), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: values[name] for name in names[shard::shards]}
        save_file(part, path / file)
        where |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path
