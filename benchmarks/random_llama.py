"""Write a Llama of about half a billion random weights as a Hugging Face folder: a second, larger model to measure.

    python benchmarks/random_llama.py OUT [--seed 0]

22 layers, hidden 1280, 20 heads over 5 of keys and values (64 each), MLP 4352, tied embedding; vocabulary, tokenizer
and chat template are the demo model's, so that text goes in and out, if without sense. Weights are normal and in
bfloat16, of deviation 0.02 in the layers, and 0.06 in the embedding, which gives logits one of about 2, as in trained
models. What the layers add then outweighs the embedding, so that the tied head does not just repeat the last token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from llmc.compiler.checkpoint import DEMO, open_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1280, "intermediate_size": 4352,
    "num_hidden_layers": 22, "num_attention_heads": 20, "num_key_value_heads": 5, "head_dim": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
Make = Callable[[dict[str, Any], int], dict[str, torch.Tensor]]
DEVIATION, EMBEDDING_DEVIATION = 0.02, 0.06


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.out, args.seed)


def write(out: Path, seed: int, changes: dict[str, Any] | None = None, built: Make | None = None) -> None:
    """The folder; of another family with `changes` of CONFIG (None takes a key out) and `built`, its tensors of a
    configuration and seed."""
    config = describe(out, changes)
    save_file((built or weights)(config, seed), out / "model.safetensors", {"format": "pt"})


def describe(out: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """All of the folder but weights; returns the configuration."""
    demo = open_checkpoint(DEMO)
    out.mkdir(parents=True, exist_ok=True)
    special = {name: demo.config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = CONFIG | {"vocab_size": demo.config["vocab_size"]} | special | (changes or {})
    config = {name: value for name, value in config.items() if value is not None}
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "generation_config.json").write_text(json.dumps(special))
    tokenizer = {"tokenizer_class": "GPT2Tokenizer", "chat_template": demo.chat_template()}
    (out / "tokenizer_config.json").write_text(json.dumps(demo.special_tokens() | tokenizer, indent=1))
    (out / "tokenizer.json").write_bytes(demo.tokenizer_json())
    return config


def weights(config: dict, seed: int) -> dict[str, torch.Tensor]:
    """Tensors by name, in the order of the layers, so that a seed means the same weights."""
    draw = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, deviation: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=draw) * deviation).to(torch.bfloat16)

    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    query, kept = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    found = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, EMBEDDING_DEVIATION)}
    for layer in range(layers):
        for name, rows, columns in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", kept, hidden),
            ("self_attn.v_proj", kept, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            found[f"model.layers.{layer}.{name}.weight"] = normal(rows, columns, DEVIATION)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    found["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return found


if __name__ == "__main__":
    main()
