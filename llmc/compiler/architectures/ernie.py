"""ERNIE 4.5."""

from __future__ import annotations

from collections.abc import Container

from llmc.compiler.architectures.shared.base import TINY, Architecture
from llmc.compiler.architectures.shared.cache import Config
from llmc.compiler.architectures.shared.experts import EXPERT_RULES, SHARED, Experts, ExpertsSize, mixed_layers
from llmc.compiler.architectures.shared.gguf_form import Gguf
from llmc.compiler.architectures.shared.names import layer
from llmc.compiler.architectures.shared.size import tied_size

ARCHITECTURES: dict[str, Architecture] = {}


def _layer(config: Config) -> list[str]:
    return layer("qkvo" if config.get("use_bias") else "", mlp_biases=bool(config.get("use_bias")))


ARCHITECTURES["ernie4_5"] = Architecture(
    summary="ERNIE 4.5: Llama's layers with RoPE that rotates neighbours; one key adds all biases.",
    model_class="Ernie4_5ForCausalLM",
    layer=_layer,
    reads=frozenset({"use_bias"}),
    size=tied_size,
    gguf=Gguf("ernie4_5", config=lambda facts: {"use_bias": "blk.0.attn_q.bias" in facts}),
    tiny={**TINY, "num_hidden_layers": 2, "use_bias": True},
)


_COUNT = ("moe_num_experts", "num_experts")


def _dense(config: Config) -> Container[int]:
    """Layers outside the range with experts, and in that range all but every `moe_layer_interval`-th."""
    layers, last = int(config["num_hidden_layers"]), int(config.get("moe_layer_end_index", -1))
    sparse = range(int(config.get("moe_layer_start_index", 1)), (layers if last == -1 else last + 1))
    return {i for i in range(layers) if i not in sparse or (i + 1) % int(config.get("moe_layer_interval", 1))}


def _router(config: Config) -> list[str]:
    shared = SHARED if config.get("moe_num_shared_experts", 2) else ()
    biases = [name.replace(".weight", ".bias") for name in shared] if config.get("use_bias") else []
    return ["gate.weight", "gate.moe_statics.e_score_correction_bias", *shared, *biases]


ARCHITECTURES["ernie4_5_moe"] = Architecture(
    summary=(
        "ERNIE 4.5 with experts: ERNIE's attention; some layers have routed experts, chosen with biases, and shared "
        "experts."
    ),
    model_class="Ernie4_5_MoeForCausalLM",
    layer_at=lambda config, i: mixed_layers(_dense, _layer, _router(config))(config, i),
    ignored=lambda config: r"model\.mtp_.+",
    reads=frozenset({
        *_COUNT, "moe_k", "moe_num_shared_experts", "moe_intermediate_size", "moe_layer_start_index",
        "moe_layer_end_index", "moe_layer_interval", "moe_norm_min", "use_bias",
    }),
    allows={"moe_gate": ("topk",), "moe_use_aux_free": (True,)},
    # a capacity matters in training only: transformers' experts take any number of tokens
    harmless=frozenset({
        "router_aux_loss_coef", "output_router_logits", "num_nextn_predict_layers", "moe_capacity",
    }),
    experts=Experts(_COUNT, "gate_up-statics"),
    sharding=EXPERT_RULES,
    size=ExpertsSize.reading(
        _COUNT, "moe_k", "moe_intermediate_size", shared_count="moe_num_shared_experts", dense=_dense,
        score_biases=True, tied=True,
    ),
    fused={"linear": 9, "rms_norm": 2},
    gguf=Gguf(
        "ernie4_5-moe",
        keys={
            "expert_count": "moe_num_experts", "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index", "interleave_moe_layer_step": "moe_layer_interval",
        },
        config=lambda facts: {"use_bias": "blk.0.attn_q.bias" in facts},
        neutral={"expert_shared_feed_forward_length": None},
    ),
    tiny={
        **TINY, "num_hidden_layers": 2, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 48,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
    },
)  # fmt: skip
