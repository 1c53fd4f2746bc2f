"""Names, sharding and sizes of experts, common to mixture-of-experts architectures."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmc.compiler.architectures.shared.sharding import LAYER, RULES, Rule
from llmc.compiler.architectures.shared.size import ModelSize, Weights
from llmc.errors import CheckpointError

EXPERTS = ".experts."
"""Part of the name of each tensor of experts, in every stored form."""

_ROUTER = re.compile(r"\.(?:gate|router)(?:\.proj)?\.weight$")


def is_router(name: str) -> bool:
    """Whether a tensor is a router's matrix."""
    return _ROUTER.search(name) is not None


def stay_floats(names: Iterable[str], stored: Container[str]) -> bool:
    """Whether stacked matrices are routers that the checkpoint does not store quantized (`stored`). A rounded router
    picks other experts when two score almost alike. So targets keep it in float32, as vLLM does."""
    return all(is_router(name) and name not in stored for name in names)


@dataclass(frozen=True)
class Experts:
    """An architecture's experts."""

    count: tuple[str, ...]
    """Keys of config.json with the number of experts per layer; transformers and publishers use different ones."""
    stored: str = "gate_up"
    """The form in published checkpoints (checkpoint/huggingface.py, CONVENTIONS)."""


def first_of(config: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The value of the first of `keys` in a configuration, or None."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


def expert_layer(attention: Sequence[str], router: Sequence[str] = ("gate.weight",), prefix: str = "mlp") -> list[str]:
    """Tensors of a layer with experts: attention and norms, and below `prefix` the router and the experts. Experts are
    one tensor [E, …] per matrix, as in transformers 5."""
    plain = [name for name in attention if not name.startswith("mlp.")]
    return [*plain, *(f"{prefix}.{name}" for name in (*router, "experts.gate_up_proj", "experts.down_proj"))]


Layers = Callable[[Mapping[str, Any]], Container[int]]
"""Returns a configuration's layers, from 0, that have an MLP instead of experts."""


def first_dense(default: int) -> Layers:
    """The first `first_k_dense_replace` layers, by default `default`."""
    return lambda config: range(int(config.get("first_k_dense_replace", default)))


def not_sparse(config: Mapping[str, Any]) -> Container[int]:
    """Layers in `mlp_only_layers`, and all but every `decoder_sparse_step`-th one."""
    step, named = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or []
    return {i for i in range(int(config["num_hidden_layers"])) if i in named or (i + 1) % step}


def mixed_layers(
    dense: Layers, attention: Callable[[Mapping[str, Any]], list[str]], router: Sequence[str]
) -> Callable[[Mapping[str, Any], int], list[str]]:
    """An architecture's `layer_at`: tensors of `attention` with its MLP, or with `router` and experts instead."""

    def layer_at(config: Mapping[str, Any], layer: int) -> list[str]:
        plain = attention(config)
        return plain if layer in dense(config) else expert_layer(plain, router)

    return layer_at


SHARED = tuple(f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down"))
"""Shared experts, as one MLP that every token uses."""
PREDICTORS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys with the number of multi-token prediction layers that follow the model's layers."""


def further_layers(config: Mapping[str, Any]) -> str | None:
    """A pattern of the tensors of `PREDICTORS`, which transformers does not load (`_keys_to_ignore_on_load_unexpected`
    in 5.23's modeling files)."""
    count, first = first_of(config, PREDICTORS), int(config["num_hidden_layers"])
    numbers = "|".join(str(first + i) for i in range(count)) if isinstance(count, int) else ""
    return rf"model\.layers\.(?:{numbers})\..+" if numbers else None


def _whole(name: str, pattern: str) -> Rule:
    return Rule(name, LAYER + pattern, None)


EXPERT_RULES = (
    *RULES,
    _whole("routers", r"(?:mlp|block_sparse_moe)\.(?:gate|router|shared_expert_gate)\.(?:\w+\.)?\w*(?:weight|bias)"),
    _whole("experts", r"(?:mlp|block_sparse_moe)\.experts\.(?:gate_up|down)_proj(?:_bias)?"),
    _whole("shared experts", r"mlp\.shared_experts?\.(?:gate|up|down)_proj\.weight"),
)
"""A plain decoder's rules; every device holds all experts."""


@dataclass(frozen=True)
class ExpertsSize(ModelSize):
    """Sizes of a decoder in which each token uses `chosen` of `experts` gated MLPs of `width` features per layer.
    `intermediate`: features that one token computes, in its chosen experts and the shared MLP."""

    experts: int
    chosen: int
    width: int
    shared: int
    """Features of the shared MLP that every token uses."""
    biased: bool = False
    """Whether experts have biases."""
    dense: int = 0
    """Number of layers with an MLP of `dense_width` features and no experts."""
    dense_width: int = 0
    score_biases: bool = False
    """Whether a router has biases for the choice."""
    shared_gate: bool = False
    """Whether a gate scales the shared MLP's output."""

    @classmethod
    def reading(
        cls, experts: Sequence[str], chosen: str, width: str = "intermediate_size", shared: str | None = None,
        *, shared_count: str | None = None, dense: Layers | None = None, biased: bool = False,
        score_biases: bool = False, tied: bool = False,
    ) -> Callable[[Mapping[str, Any], str], ModelSize]:  # fmt: skip
        """An architecture's `size`, from these keys of config.json.

        `shared` is the key with the features of a gated shared MLP, `shared_count` the key with the number of shared
        experts; the configuration may lack both. `tied`: the default of `tie_word_embeddings`.
        """

        def size(config: Mapping[str, Any], source: str) -> ModelSize:
            def of(*names: str) -> int:
                value = first_of(config, names)
                if type(value) is not int or value < 1:
                    raise CheckpointError(
                        f"{source}: {names[0]} is {value!r}, not a size; its memory cannot be estimated"
                    )
                return value

            beside = of(shared) if shared and config.get(shared) else 0
            beside += of(shared_count) * of(width) if shared_count and config.get(shared_count) else 0
            alike = {"tie_word_embeddings": tied, **config, "intermediate_size": of(width)}
            plain = asdict(ModelSize.of(alike, source))
            count = of(*experts)
            if of(chosen) > count:
                raise CheckpointError(
                    f"{source}: {chosen} is {of(chosen)}, but {experts[0]} is only {count}: correct config.json"
                )
            without = dense(config) if dense else ()
            dense_layers = sum(i in without for i in range(plain["layers"]))
            dense_width = of("intermediate_size") if dense_layers else 0
            plain |= cls._more(config, of)
            plain["intermediate"] = max(of(chosen) * of(width) + beside, dense_width)
            return cls(
                **plain, experts=count, chosen=of(chosen), width=of(width), shared=beside, biased=biased,
                dense=dense_layers, dense_width=dense_width, score_biases=score_biases,
                shared_gate=bool(shared and beside),
            )  # fmt: skip

        return size

    @staticmethod
    def _more(config: Mapping[str, Any], of: Callable[..., int]) -> dict[str, Any]:
        """Fields that a subclass adds or overrides; `of` reads a size."""
        return {}

    @property
    def attention_weights(self) -> int:
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def _matrices(self, experts: int) -> list[Weights]:
        sparse = self.layers - self.dense
        router = self.hidden * (self.experts + self.shared_gate) + self.experts * self.score_biases
        mlps = sparse * (router + 3 * self.hidden * self.shared) + self.dense * 3 * self.hidden * self.dense_width
        biases = 2 * self.width + self.hidden if self.biased else 0
        inner = sparse * experts * (self.hidden * 3 * self.width + biases)
        layers = Weights(self.layers * self.attention_weights + mlps)
        return [layers, Weights(inner, experts=True), self.embed_lm_head]

    @property
    def weights(self) -> list[Weights]:
        return self._matrices(self.experts)

    @property
    def active_parameters(self) -> int:
        return sum(weights.count for weights in self._matrices(self.chosen))
