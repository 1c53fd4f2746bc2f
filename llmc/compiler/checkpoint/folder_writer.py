"""Write a checkpoint as a Hugging Face folder, dequantized to float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from llmc.compiler.checkpoint.base import Checkpoint, coded_names


def is_plain_folder(checkpoint: Checkpoint) -> bool:
    """Whether other programs read the checkpoint's own files like llmc: an unquantized Hugging Face folder."""
    return checkpoint.format == "huggingface" and not coded_names(checkpoint)


def write_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Create `folder` with config.json, model.safetensors, the tokenizer and its template. Raises CheckpointError for
    tensors that cannot be read, OSError if the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(checkpoint.config)
    config |= {"torch_dtype": "float32", "architectures": config.get("architectures") or ["LlamaForCausalLM"]}
    generation = checkpoint.generation_config()
    ends = generation.get("eos_token_ids") or [config.get("eos_token_id")]
    tokenizer = {"tokenizer_class": "GPT2Tokenizer", "chat_template": checkpoint.chat_template()}
    files = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": generation.get("bos_token_id"), "eos_token_id": ends[0]},
        "tokenizer_config.json": checkpoint.special_tokens() | tokenizer,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    (folder / "tokenizer.json").write_bytes(checkpoint.tokenizer_json())
    tensors = {name: np.array(checkpoint.tensor(name)) for name in checkpoint.tensor_names()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
