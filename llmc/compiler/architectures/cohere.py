"""Cohere's models."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import WINDOW, Architecture, tiny_without
from llmc.compiler.architectures.shared.cache import Config, cache_in_turn
from llmc.compiler.architectures.shared.gguf_form import WINDOWS, Gguf, attention_bias, windows
from llmc.compiler.architectures.shared.names import biased_layer
from llmc.compiler.architectures.shared.size import tied_size

ARCHITECTURES: dict[str, Architecture] = {}


def _layer(config: Config) -> list[str]:
    found = biased_layer(config, qk_norms=bool(config.get("use_qk_norm")))
    return [part for part in found if part != "post_attention_layernorm.weight"]


ARCHITECTURES["cohere"] = Architecture(
    summary=(
        "Cohere's Command R: attention and MLP read one norm in parallel; norms subtract the mean; RoPE rotates "
        "neighbours."
    ),
    model_class="CohereForCausalLM",
    layer=_layer,
    unread=frozenset({"rms_norm_eps"}),
    reads=frozenset({"attention_bias", "layer_norm_eps", "logit_scale", "use_qk_norm"}),
    harmless=frozenset({"model_max_length"}),
    size=tied_size,
    gguf=Gguf(
        "command-r", keys={"logit_scale": "logit_scale"},
        config=lambda facts: {
            **attention_bias(facts), "use_qk_norm": "blk.0.attn_q_norm.weight" in facts,
        },
    ),
    tiny={
        **tiny_without("head_dim", "rms_norm_eps"), "num_hidden_layers": 2,
        "tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.5, "use_qk_norm": True,
    },
)  # fmt: skip


ARCHITECTURES["cohere2"] = Architecture(
    summary="Cohere's Command R7B and A: Command R's layers; layers without a window have no rotary positions.",
    model_class="Cohere2ForCausalLM",
    layer=_layer,
    unread=frozenset({"rms_norm_eps"}),
    reads=frozenset({
        "attention_bias", "layer_norm_eps", "logit_scale", "sliding_window", "layer_types", "sliding_window_pattern",
    }),
    allows={
        "layer_switch": (4,), "order_of_interleaved_layers": ("local_attn_first",), "rotary_pct": (1, 1.0),
        "position_embedding_type": ("rope_gptj",), "use_embedding_sharing": (True,), "use_gated_activation": (True,),
        "use_parallel_block": (True,), "use_parallel_embedding": (False,),
    },
    harmless=frozenset({"cache_implementation", "model_max_length"}),
    cache=cache_in_turn(4),
    size=tied_size,
    gguf=Gguf("cohere2", keys={"logit_scale": "logit_scale"}, config=windows(4), reads=WINDOWS),
    tiny={
        **tiny_without("head_dim", "rms_norm_eps"), "num_hidden_layers": 2,
        "tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.5, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)  # fmt: skip
