"""Write a checkpoint as a Hugging Face folder, dequantised to float32, for peers that read nothing else.

python benchmarks/export_hf.py smollm2-demo OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from llmc.compiler.checkpoint import open_checkpoint


def main(model: str, out: Path) -> None:
    checkpoint = open_checkpoint(model)
    out.mkdir(parents=True, exist_ok=True)
    special = checkpoint.special_tokens()
    config = checkpoint.config
    config = config | {"torch_dtype": "float32", "architectures": config.get("architectures") or ["LlamaForCausalLM"]}
    generation = checkpoint.generation_config()
    eos = generation.get("eos_token_ids") or [config.get("eos_token_id")]
    files = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": generation.get("bos_token_id"), "eos_token_id": eos[0]},
        "tokenizer_config.json": special
        | {"tokenizer_class": "GPT2Tokenizer", "chat_template": checkpoint.chat_template()},
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=1))
    (out / "tokenizer.json").write_bytes(checkpoint.tokenizer_json())
    tensors = {name: np.array(checkpoint.tensor(name)) for name in checkpoint.tensor_names()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
