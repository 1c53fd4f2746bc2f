"""MPT: ALiBi in place of positions, no biases, queries, keys and values in one tensor."""

from __future__ import annotations

from typing import Any

from llmc.compiler.architectures.shared.base import Config, Family
from llmc.compiler.architectures.shared.gpt import NO_ROPE
from llmc.compiler.architectures.shared.names import Names
from llmc.compiler.architectures.shared.sharding import rules
from llmc.compiler.architectures.shared.size import ModelSize
from llmc.errors import CheckpointError

NAMES = Names("transformer.blocks", "transformer.wte.weight", others=lambda config: ["transformer.norm_f.weight"])
_ATTENTION = {
    "attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False, "attn_uses_sequence_id": False,
    "alibi": True, "alibi_bias_max": 8,
}  # fmt: skip
"""Members of `attn_config` that transformers does not read, with the values of what it computes."""


def _derived(config: Config) -> dict[str, Any]:
    said = config.get("attn_config") or {}
    other = next((name for name, value in _ATTENTION.items() if said.get(name, value) != value), None)
    if other is not None:
        raise CheckpointError(
            f"config.json: attn_config has {other} {said[other]!r}, and transformers computes {_ATTENTION[other]!r}: "
            "the model is not supported"
        )
    return {
        "intermediate_size": 4 * config["hidden_size"],
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }


FAMILY = Family(
    model_class="MptForCausalLM",
    layer=lambda config: [
        f"{part}.weight" for part in ("norm_1", "attn.Wqkv", "attn.out_proj", "norm_2", "ffn.up_proj", "ffn.down_proj")
    ],
    names=NAMES,
    keys={
        "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    },
    derived=_derived,
    unread=NO_ROPE | {"num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "intermediate_size"},
    reads=frozenset({"attn_config", "layer_norm_epsilon"}),
    allows={
        "no_bias": (True,), "expansion_ratio": (4,), "logit_scale": (None,),
        "norm_type": ("low_precision_layernorm", "layernorm"),
    },
    harmless=frozenset({"learned_pos_emb", "init_device", "init_config", "embedding_fraction", "emb_pdrop", "verbose"}),
    sharding=rules(NAMES, output=r"attn\.out_proj", up=r"ffn\.up_proj", down=r"ffn\.down_proj"),
    size=ModelSize.ungated,
    tiny={
        "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128, "layer_norm_epsilon": 1e-5,
        "attn_config": {"clip_qkv": 1.5},
    },
)  # fmt: skip
