"""What families of mixture-of-experts models have in common: names, splits and sizes of their experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmc.compiler.architectures.shared.sharding import LAYER, RULES, Rule
from llmc.compiler.architectures.shared.size import ModelSize, Weights
from llmc.errors import CheckpointError

EXPERTS = ".experts."
"""In the name of each tensor of experts, however it is stored."""


@dataclass(frozen=True)
class Experts:
    """A family's experts."""

    count: tuple[str, ...]
    """The keys of config.json that say how many a layer has; transformers and publishers use different ones."""
    stored: str = "gate_up"
    """How published checkpoints hold them (checkpoint/experts.py, CONVENTIONS)."""


def first_of(config: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The value of the first of `keys` that a configuration has; None where it has none of them."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


def expert_layer(attention: Sequence[str], router: Sequence[str] = ("gate.weight",), place: str = "mlp") -> list[str]:
    """Tensors of a layer of experts: those of `attention` and norms, and below `place` the router's and the experts'.

    The experts' are one tensor [E, …] each, as transformers 5 has them.
    """
    plain = [name for name in attention if not name.startswith("mlp.")]
    return [*plain, *(f"{place}.{name}" for name in (*router, "experts.gate_up_proj", "experts.down_proj"))]


def _whole(name: str, pattern: str) -> Rule:
    return Rule(name, LAYER + pattern, None)


EXPERT_RULES = (
    *RULES,
    _whole("routers", r"(?:mlp|block_sparse_moe)\.(?:gate|router|shared_expert_gate)\.(?:weight|bias)"),
    _whole("experts", r"(?:mlp|block_sparse_moe)\.experts\.(?:gate_up|down)_proj(?:_bias)?"),
    _whole("shared experts", r"mlp\.shared_experts?\.(?:gate|up|down)_proj\.weight"),
)
"""A plain decoder's rules; every device holds all experts."""


@dataclass(frozen=True)
class ExpertsSize(ModelSize):
    """The sizes of a decoder whose tokens take `chosen` of `experts` gated MLPs of `width` features in a layer.

    `intermediate` is what one token makes: the features of all the experts chosen for it, and of what is shared.
    """

    experts: int
    chosen: int
    width: int
    shared: int
    """Features of the MLP that every token takes beside its experts."""
    biased: bool = False
    """Whether experts have biases."""

    @classmethod
    def reading(
        cls, experts: Sequence[str], chosen: str, width: str = "intermediate_size", shared: str | None = None,
        *, biased: bool = False,
    ) -> Callable[[Mapping[str, Any], str], ModelSize]:  # fmt: skip
        """A family's `size`, from the keys of config.json that hold these; `shared` may be absent there."""

        def size(config: Mapping[str, Any], source: str) -> ModelSize:
            def of(*names: str) -> int:
                value = first_of(config, names)
                if type(value) is not int or value < 1:
                    raise CheckpointError(
                        f"{source}: {names[0]} is {value!r}, not a size; its memory cannot be estimated"
                    )
                return value

            beside = of(shared) if shared and config.get(shared) else 0
            plain = asdict(ModelSize.of({**config, "intermediate_size": of(width)}, source))
            count = of(*experts)
            if of(chosen) > count:
                raise CheckpointError(
                    f"{source}: {chosen} is {of(chosen)}, and {experts[0]} only {count}: correct them"
                )
            plain["intermediate"] = of(chosen) * of(width) + beside
            return cls(**plain, experts=count, chosen=of(chosen), width=of(width), shared=beside, biased=biased)

        return size

    def _matrices(self, experts: int) -> list[Weights]:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        gates = self.experts + (1 if self.shared else 0)
        layer = attention + self.hidden * (gates + 3 * self.shared)
        biases = 2 * self.width + self.hidden if self.biased else 0
        inner = self.layers * experts * (self.hidden * 3 * self.width + biases)
        outer = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return [Weights(self.layers * layer), Weights(inner, experts=True), Weights(outer, outer=True)]

    @property
    def weights(self) -> list[Weights]:
        """Of all experts."""
        return self._matrices(self.experts)

    @property
    def active_parameters(self) -> int:
        """Weights that one token's step reads."""
        return sum(weights.count for weights in self._matrices(self.chosen))
