"""Gemma's models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llmc.compiler.architectures.shared.base import TINY, WINDOW, Architecture
from llmc.compiler.architectures.shared.cache import SLIDING, Config, cache_in_turn, hybrid_cache, types_in_turn
from llmc.compiler.architectures.shared.experts import Experts
from llmc.compiler.architectures.shared.gguf_form import WINDOWS, Gguf, GgufFacts, windows
from llmc.compiler.architectures.shared.names import NORM, Names, biased_layer
from llmc.compiler.architectures.shared.sharding import LAYER, RULES, Rule
from llmc.compiler.architectures.shared.size import CountedSize, tied_size
from llmc.errors import CheckpointError
from llmc.runtime.cache_shape import CacheShape, key_value

ARCHITECTURES: dict[str, Architecture] = {}

ARCHITECTURES["gemma"] = Architecture(
    summary="Gemma: Llama's layers with norms that add 1 to their weight, GELU, and scaled embeddings.",
    model_class="GemmaForCausalLM",
    layer=biased_layer,
    reads=frozenset({"attention_bias"}),
    allows={"use_bidirectional_attention": (False,), "hidden_activation": ("gelu_pytorch_tanh",)},
    size=tied_size,
    gguf=Gguf("gemma", config=lambda facts: {"hidden_act": "gelu_pytorch_tanh"}, norm_offset=1),
    tiny={**TINY, "num_hidden_layers": 2, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
)


_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
"""Metadata of GGUF files."""


def _score_scale(facts: GgufFacts, largest: int) -> dict[str, Any]:
    """The square of the divisor of attention scores. llama.cpp knows the largest model, which has its own divisor, by
    the number of its layers."""
    common = facts.common
    plain = common["num_hidden_layers"] != largest
    scalar = common["head_dim"] if plain else common["hidden_size"] // common["num_attention_heads"]
    return {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}


def _gguf_config(facts: GgufFacts) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": float(facts.get("rope.freq_base_swa", 10000.0))}
    rope = {"sliding_attention": local, "full_attention": facts.common["rope_parameters"]}
    return {**windows(6)(facts), **_score_scale(facts, 62), "rope_parameters": rope}


_NORMS = ["pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"]


ARCHITECTURES["gemma2"] = Architecture(
    summary="Gemma 2: Gemma's layers with norms around each block, capped scores and logits, alternating windows.",
    model_class="Gemma2ForCausalLM",
    layer=lambda config: [*biased_layer(config), *_NORMS],
    unread=frozenset({"hidden_act"}),
    reads=frozenset({
        "attention_bias", "hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types",
        "final_logit_softcapping", "attn_logit_softcapping",
    }),
    allows={
        "use_bidirectional_attention": (False,), "hidden_act": ("gelu_pytorch_tanh",), "sliding_window_size": (4096,),
    },
    harmless=frozenset({"cache_implementation"}),
    cache=cache_in_turn(2),
    size=tied_size,
    gguf=Gguf(
        "gemma2", keys=_CAPS, config=lambda facts: {**windows(2)(facts), **_score_scale(facts, 46)}, reads=WINDOWS,
        norm_offset=1,
    ),
    tiny={
        **TINY, "num_hidden_layers": 2, "tie_word_embeddings": True, "sliding_window": WINDOW,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 2.0,
    },
)  # fmt: skip


_GEMMA3_DEFAULTS = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131072,
}  # fmt: skip
"""Keys that `text_config` of published checkpoints (google/gemma-3-4b-it) leaves out, with transformers 5.23's defaults
(models/gemma3/configuration_gemma3.py)."""


ARCHITECTURES["gemma3_text"] = replace(
    ARCHITECTURES["gemma2"],
    summary="Gemma 3's text model: Gemma 2's layers with normalised queries and keys; windows have their own RoPE.",
    model_class="Gemma3ForCausalLM",
    layer=lambda config: [*biased_layer(config, qk_norms=True), *_NORMS],
    derived=lambda config: {name: config.get(name, value) for name, value in _GEMMA3_DEFAULTS.items()},
    reads=frozenset({
        "attention_bias", "hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types",
        "sliding_window_pattern", "final_logit_softcapping", "rope_local_base_freq",
    }),
    allows={"use_bidirectional_attention": (False,), "_sliding_window_pattern": (6,)},
    cache=cache_in_turn(6),
    gguf=Gguf("gemma3", keys=_CAPS, config=_gguf_config, reads=WINDOWS | {"rope.freq_base_swa"}, norm_offset=1),
    tiny={
        **TINY, "num_hidden_layers": 2, "tie_word_embeddings": True, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"], "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
        },
    },
)  # fmt: skip


# Source: transformers 5.23, models/gemma4/configuration_gemma4.py and modeling_gemma4.py.


_GEMMA4_DEFAULTS = {**_GEMMA3_DEFAULTS, "vocab_size": 262144}
"""transformers' defaults of keys that a configuration may leave out."""
_OVERRIDES = {"head_dim", "num_key_value_heads"}


def _types(config: Config) -> list[str]:
    """Layer types; by default one layer in six sees all tokens. The last one always does."""
    count = int(config["num_hidden_layers"])
    said = config.get("layer_types") or types_in_turn(count, 6)
    if len(said) != count:
        raise ValueError(f"layer_types has {len(said)} layers, num_hidden_layers is {count}")
    return [*said[:-1], "full_attention"]


def _stored(config: Config) -> int:
    """Number of first layers with their own keys and values; later layers share them."""
    return int(config["num_hidden_layers"]) - int(config.get("num_kv_shared_layers") or 0)


def _heads(config: Config) -> list[tuple[int, int]]:
    """Each layer's (KV heads, head width), from `per_layer_config` or else from the global sizes."""
    plain = {name: config.get(name, _GEMMA4_DEFAULTS[name]) for name in _OVERRIDES}
    wide = {**plain, "head_dim": config.get("global_head_dim", 512)}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        wide["num_key_value_heads"] = config["num_global_key_value_heads"]
    sizes = [plain if kind == SLIDING else wide for kind in _types(config)]
    if "per_layer_config" in config:
        said = {int(layer): own for layer, own in (config["per_layer_config"] or {}).items()}
        if unknown := {name for own in said.values() for name in own} - _OVERRIDES:
            raise ValueError(f"per_layer_config says {sorted(unknown)[0]}, which no layer reads")
        sizes = [{**plain, **said.get(i, {})} for i in range(len(sizes))]
    return [(int(each["num_key_value_heads"]), int(each["head_dim"])) for each in sizes]


def _cache(config: Config) -> CacheShape:
    types, window = _types(config), config.get("sliding_window", 512)
    return hybrid_cache([
        key_value(i, heads, width, window=window if types[i] == SLIDING else None) if i < _stored(config) else []
        for i, (heads, width) in enumerate(_heads(config))
    ])  # fmt: skip


def _own_values(config: Config, layer: int) -> bool:
    """Whether a layer projects values; otherwise its values are the keys before their norm."""
    return not config.get("attention_k_eq_v") or _types(config)[layer] == SLIDING


def _layer_at(config: Config, layer: int) -> list[str]:
    ends = ("weight", "bias") if config.get("attention_bias") else ("weight",)
    projections, norms = ["q", "o"], ["self_attn.q_norm"]
    if layer < _stored(config):
        projections += ["k", "v"] if _own_values(config, layer) else ["k"]
        norms.append("self_attn.k_norm")
    norms += ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    parts = [f"self_attn.{name}_proj.{end}" for name in projections for end in ends]
    parts += ["layer_scalar", *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))]
    if _per_layer(config):
        norms.append("post_per_layer_input_norm")
        parts += ["per_layer_input_gate.weight", "per_layer_projection.weight"]
    if config.get("enable_moe_block"):
        norms += [f"{prefix}_feedforward_layernorm_{n}" for prefix, n in (("post", 1), ("post", 2), ("pre", 2))]
        parts += [f"router.{name}" for name in ("proj.weight", "scale", "per_expert_scale")]
        parts += ["experts.gate_up_proj", "experts.down_proj"]
    return [*parts, *(f"{name}.weight" for name in norms)]


def _per_layer(config: Config) -> int:
    """Width of the per-layer token embedding; 0 without one."""
    return int(config.get("hidden_size_per_layer_input", 256) or 0)


def _others(config: Config) -> list[str]:
    parts = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
    return [NORM, *(f"model.{part}.weight" for part in parts if _per_layer(config))]


def _unused_keys(config: Config) -> str | None:
    """Pattern of stored keys and values in layers that share those of others; transformers ignores them."""
    numbers = "|".join(str(i) for i in range(_stored(config), int(config["num_hidden_layers"])))
    return rf"model\.layers\.(?:{numbers})\.self_attn\.[kv]_(?:proj|norm)\.(?:weight|bias)" if numbers else None


@dataclass(frozen=True)
class _Size(CountedSize):
    table: int = 0
    """The part of `inner` in per-layer embeddings, of which a token reads one row."""

    @property
    def active_parameters(self) -> int:
        return super().active_parameters - self.table


def _size(config: Config, source: str) -> _Size:
    plain = tied_size(config, source)
    hidden, own = plain.hidden, _per_layer(config)
    table = int(config.get("vocab_size_per_layer_input", 262144)) * plain.layers * own
    inner, widest = table + hidden * plain.layers * own, 0
    for i, (kv_heads, width) in enumerate(_heads(config)):
        shared = i >= _stored(config)
        kept = 0 if shared else kv_heads * (2 if _own_values(config, i) else 1)
        mlp = plain.intermediate * (2 if shared and config.get("use_double_wide_mlp") else 1)
        inner += hidden * (width * (2 * plain.heads + kept) + 3 * mlp + 2 * own)
        widest = max(widest, mlp)
    experts = chosen = each = 0
    if config.get("enable_moe_block"):
        names = ("num_experts", "top_k_experts", "moe_intermediate_size")
        if missing := [name for name in names if type(config.get(name)) is not int]:
            raise CheckpointError(f"{source}: {missing[0]} is {config.get(missing[0])!r}, not a size; correct it")
        experts, chosen, width = (config[name] for name in names)
        each = plain.layers * 3 * hidden * width
        inner += plain.layers * hidden * experts
        widest += chosen * width
    return _Size(
        **{**vars(plain), "intermediate": widest}, inner=inner, expert_weights=experts * each,
        chosen_weights=chosen * each, table=table,
    )  # fmt: skip


_OWN_INPUT = r"per_layer_(?:input_gate|projection)\.weight|model\.(?:embed_tokens_per_layer|per_layer_model_projection)"


ARCHITECTURES["gemma4_text"] = Architecture(
    summary="Gemma 4's text model: wider global heads, shared keys and values, per-layer embeddings, experts.",
    model_class="Gemma4ForCausalLM",
    layer_at=_layer_at,
    names=Names(others=_others),
    ignored=_unused_keys,
    derived=lambda config: {name: config.get(name, value) for name, value in _GEMMA4_DEFAULTS.items()},
    unread=frozenset({"hidden_act"}),
    reads=frozenset({
        "attention_bias", "hidden_activation", "sliding_window", "layer_types", "final_logit_softcapping",
        "per_layer_config", "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v",
        "num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input", "vocab_size_per_layer_input",
        "enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size",
    }),
    allows={"use_bidirectional_attention": ("vision",)},  # affects image tokens only, which are not compiled
    harmless=frozenset({"cache_implementation"}),
    experts=Experts(("num_experts",)),
    sharding=(
        *RULES,
        Rule("experts and routers", LAYER + r"(?:experts|router)\.\w+(?:\.weight)?", None),
        Rule("numbered norms", LAYER + r"\w+_layernorm_\d\.weight", None),
        Rule("layers' scalars", LAYER + r"layer_scalar", None),
        Rule("layers' own inputs", rf"{LAYER}{_OWN_INPUT}\.weight", None),
    ),
    cache=_cache,
    size=_size,
    tiny={
        **TINY, "num_hidden_layers": 4, "tie_word_embeddings": True, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 257,
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32,
        "final_logit_softcapping": 3.0,
    },
)  # fmt: skip


def _vaultgemma_layer(config: Config) -> list[str]:
    found = biased_layer(config)
    return ["pre_feedforward_layernorm.weight", *(p for p in found if p != "post_attention_layernorm.weight")]


ARCHITECTURES["vaultgemma"] = replace(
    ARCHITECTURES["gemma2"],
    summary="VaultGemma: Gemma 2 without the norms after its blocks.",
    model_class="VaultGemmaForCausalLM",
    layer=_vaultgemma_layer,
    allows={},
    harmless=frozenset(),
    gguf=None,
    tiny={**ARCHITECTURES["gemma2"].tiny, "layer_types": ["sliding_attention", "full_attention"]},
)
