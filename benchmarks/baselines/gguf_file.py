"""Write a checkpoint of the Llama, Qwen2 or Qwen3 architecture as a GGUF file: matrices in float16, vectors in float32.

Tensor names come from the gguf package's table. Rows of a Llama's q and k are written in llama.cpp's order, which
rotates neighbours where transformers rotates halves (llama.cpp's convert_hf_to_gguf.py). The tokenizer has to be
byte-level BPE with a splitting rule that has a name in GGUF.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES, GGMLQuantizationType, LlamaFileType

from llmc.compiler.architectures.shared.architectures import architecture
from llmc.compiler.architectures.shared.base import Gguf
from llmc.compiler.architectures.shared.caches import uniform_cache_of
from llmc.compiler.checkpoint.base import Checkpoint
from llmc.compiler.checkpoint.gguf_tokenizer import PRE_TOKENIZERS
from llmc.errors import CheckpointError

KINDS = ("llama", "qwen2", "qwen3")
"""Model types that are written."""


def write_gguf(checkpoint: Checkpoint, path: Path) -> None:
    """Write the file. Raises CheckpointError for another architecture, rotary scaling or kind of tokenizer."""
    config = checkpoint.config
    kind = str(config.get("model_type"))
    if kind not in KINDS:
        raise _unsupported(checkpoint, f"architecture {kind!r}", ", ".join(KINDS))
    gguf = architecture(config).gguf
    assert gguf is not None  # its kind is among the known ones
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise _unsupported(checkpoint, f"rotary scaling {rope['rope_type']!r}", "default")
    writer = GGUFWriter(path, gguf.architecture, use_temp_file=True)
    _add_config(writer, config, float(rope.get("rope_theta", 10000.0)), checkpoint.path.stem)
    _add_tokenizer(writer, checkpoint)
    _add_tensors(writer, checkpoint, gguf)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _unsupported(checkpoint: Checkpoint, what: str, known: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint.path}: no GGUF file is written of {what}; supported: {known}")


def _add_config(writer: GGUFWriter, config: dict[str, Any], theta: float, name: str) -> None:
    cache = uniform_cache_of(config, "gguf")
    writer.add_name(name)
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(cache.layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(cache.kv_heads)
    writer.add_key_length(cache.head_dim)
    writer.add_value_length(cache.head_dim)
    writer.add_rope_dimension_count(cache.head_dim)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: GGUFWriter, checkpoint: Checkpoint) -> None:
    source = json.loads(checkpoint.tokenizer_json())
    model = source["model"]
    if model.get("type") != "BPE" or (source.get("decoder") or {}).get("type") != "ByteLevel":
        raise _unsupported(checkpoint, f"a tokenizer of type {model.get('type')!r}", "byte-level BPE")
    size = int(checkpoint.config["vocab_size"])
    tokens = [f"[unused{i}]" for i in range(size)]
    types = [int(TokenType.UNUSED)] * size
    for text, index in model["vocab"].items():
        tokens[index], types[index] = text, int(TokenType.NORMAL)
    for added in source.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = int(TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splitting(source.get("pre_tokenizer") or {}, checkpoint))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    generation = checkpoint.generation_config()
    if generation.get("bos_token_id") is not None:
        writer.add_bos_token_id(generation["bos_token_id"])
    if generation.get("eos_token_ids"):
        writer.add_eos_token_id(generation["eos_token_ids"][0])
    writer.add_add_bos_token(False)
    template = checkpoint.chat_template()
    if template is not None:
        writer.add_chat_template(template)


def _splitting(pre_tokenizer: dict[str, Any], checkpoint: Checkpoint) -> str:
    """GGUF's name of the splitting rule."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    digits = any(step.get("type") == "Digits" and step.get("individual_digits") for step in steps)
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    wanted = ([r"\p{N}"] if digits else []) + [pattern for pattern in patterns if pattern]
    for name, rule in PRE_TOKENIZERS.items():
        if rule.bytes and [*rule.patterns] == wanted and rule.gpt2 == (not patterns):
            return name
    raise _unsupported(checkpoint, "a tokenizer that splits text so", ", ".join(PRE_TOKENIZERS))


def interleaved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder rows [N, …] of a q or k projection to llama.cpp's order: the two halves of each head interleaved."""
    half = rows.shape[0] // heads // 2
    return np.ascontiguousarray(rows.reshape(heads, 2, half, *rows.shape[1:]).swapaxes(1, 2)).reshape(rows.shape)


def _add_tensors(writer: GGUFWriter, checkpoint: Checkpoint, gguf: Gguf) -> None:
    config = checkpoint.config
    rows = {"q_proj": int(config["num_attention_heads"]), "k_proj": uniform_cache_of(config, "gguf").kv_heads}
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == gguf.architecture)
    names = get_tensor_name_map(arch, int(config["num_hidden_layers"]))
    for name in checkpoint.tensor_names():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise _unsupported(checkpoint, f"tensor {name!r}", "those of the plain architecture")
        array = checkpoint.tensor(name)
        part = name.split(".")[-2]
        if gguf.interleaved and part in rows:
            array = interleaved(array, rows[part])
        if array.ndim > 1:
            writer.add_tensor(found, array.astype(np.float16), raw_dtype=GGMLQuantizationType.F16)
        else:
            writer.add_tensor(found, np.array(array, np.float32))
