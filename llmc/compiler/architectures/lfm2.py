"""LFM2."""

from __future__ import annotations

from llmc.compiler.architectures.shared.base import Architecture, tiny_without
from llmc.compiler.architectures.shared.cache import ATTENTION, Config, attention_layer, hybrid_cache
from llmc.compiler.architectures.shared.gguf_form import Gguf
from llmc.compiler.architectures.shared.names import Names, with_biases
from llmc.compiler.architectures.shared.sharding import rules
from llmc.compiler.architectures.shared.size import CountedSize, attention_weights
from llmc.runtime.cache_shape import CacheShape, CacheTensor

ARCHITECTURES: dict[str, Architecture] = {}

NAMES = Names(others=lambda config: ["model.embedding_norm.weight"])


def _types(config: Config) -> list[bool]:
    if config.get("layer_types"):
        return [kind in ATTENTION for kind in config["layer_types"]]
    count = range(config["num_hidden_layers"])
    indices = config.get("full_attn_idxs")
    return [indices is None or i in indices for i in count]


def _layer(config: Config, index: int) -> list[str]:
    if _types(config)[index]:
        parts = [f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "out_proj")]
        parts += ["self_attn.q_layernorm.weight", "self_attn.k_layernorm.weight"]
    else:
        names = ("conv.conv", "conv.in_proj", "conv.out_proj")
        parts = with_biases(*names) if config.get("conv_bias") else [f"{name}.weight" for name in names]
    return [
        *parts, *(f"feed_forward.{name}.weight" for name in ("w1", "w2", "w3")), "operator_norm.weight",
        "ffn_norm.weight",
    ]  # fmt: skip


def _width(config: Config) -> int:
    """Features of the MLP. Source: modeling_lfm2.py, Lfm2MLP."""
    width = int(config.get("block_ff_dim") or config["intermediate_size"])
    if config.get("block_auto_adjust_ff_dim", True):
        width = int((config.get("block_ffn_dim_multiplier") or 1) * int(2 * width / 3))
        multiple = int(config.get("block_multiple_of") or 256)
        width = multiple * -(-width // multiple)
    return width


def _cache(config: Config) -> CacheShape:
    convolved = (int(config.get("conv_L_cache") or 3) - 1, config["hidden_size"])
    return hybrid_cache([
        attention_layer(config, i) if attends else [CacheTensor(i, "conv", "state", convolved)]
        for i, attends in enumerate(_types(config))
    ])  # fmt: skip


def _size(config: Config, source: str) -> CountedSize:
    types, hidden = _types(config), config["hidden_size"]
    short = 4 * hidden * hidden + hidden * int(config.get("conv_L_cache") or 3)
    inner = sum(attention_weights(config) if attends else short for attends in types)
    inner += len(types) * 3 * hidden * _width(config)
    return CountedSize.counted({**config, "intermediate_size": _width(config)}, source, inner=inner)


ARCHITECTURES["lfm2"] = Architecture(
    summary="LFM2: short gated convolutions in most layers, attention with normalised queries and keys in the others.",
    model_class="Lfm2ForCausalLM",
    layer_at=_layer,
    names=NAMES,
    derived=lambda config: {
        "tie_word_embeddings": config.get("tie_word_embeddings", config.get("tie_embedding", True)),
    },
    unread=frozenset({"hidden_act", "rms_norm_eps"}),
    reads=frozenset({
        "norm_eps", "conv_bias", "conv_L_cache", "block_multiple_of", "block_ffn_dim_multiplier",
        "block_auto_adjust_ff_dim", "block_ff_dim", "full_attn_idxs", "layer_types", "tie_embedding",
    }),
    # transformers ignores `theta`: published configurations also state rope_theta, whose default this is
    allows={
        "block_use_swiglu": (True,), "block_use_xavier_init": (True, False), "use_pos_enc": (True,), "theta": (1e6,),
    },
    harmless=frozenset({
        "block_mlp_init_scale", "block_out_init_scale", "block_norm_eps", "block_dim", "conv_dim", "conv_dim_out",
        "conv_use_xavier_init", "num_heads",
    }),
    sharding=rules(
        NAMES, query=r"self_attn\.q_proj", keys=r"self_attn\.[kv]_proj", output=r"self_attn\.out_proj",
        up=r"feed_forward\.w[13]", down=r"feed_forward\.w2", features=_width,
    ),
    size=_size,
    cache=_cache,
    fused={"linear": 5, "rms_norm": 0},
    gguf=Gguf(
        "lfm2", keys={"shortconv.l_cache": "conv_L_cache"},
        config=lambda facts: {
            "layer_types": ["full_attention" if heads else "conv" for heads in facts.get("attention.head_count_kv")],
            "block_auto_adjust_ff_dim": False, "conv_bias": False,
        },
    ),
    tiny={
        **tiny_without("head_dim", "rms_norm_eps", "tie_word_embeddings"),
        "num_hidden_layers": 2, "norm_eps": 1e-5, "layer_types": ["conv", "full_attention"], "block_multiple_of": 32,
    },
)  # fmt: skip
