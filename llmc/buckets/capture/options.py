"""Graph capture options: memory for graphs, its split between phases, and capture order."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.buckets.bucket import PHASES, Phase
from llmc.buckets.capture.order import STRATEGIES
from llmc.errors import InputError, UnknownNameError
from llmc.settings import Settings


@dataclass(frozen=True)
class CaptureOptions:
    """Values of flags and environment variables; the defaults are the Gaudi guide's.

    gpu_memory_utilization  usable share of the memory that is free after the profile run, above 0, at most 1
    graph_reserved_mem      share of that for graphs, 0 … 1; the rest is KV cache (VLLM_GRAPH_RESERVED_MEM)
    graph_prompt_ratio      share of the graph memory that prompt graphs may take first, 0 … 1
                            (VLLM_GRAPH_PROMPT_RATIO)
    prompt_strategy, decode_strategy    capture order, a name of order.py (VLLM_GRAPH_{PROMPT|DECODE}_STRATEGY)

    Raises InputError for a share out of range, UnknownNameError for an unknown strategy.
    """

    gpu_memory_utilization: float = 0.9
    graph_reserved_mem: float = 0.1
    graph_prompt_ratio: float = 0.3
    prompt_strategy: str = "min_tokens"
    decode_strategy: str = "max_bs"

    def __post_init__(self) -> None:
        for name in ("gpu_memory_utilization", "graph_reserved_mem", "graph_prompt_ratio"):
            share = getattr(self, name)
            if not 0 <= share <= 1:
                raise InputError(f"--{name.replace('_', '-')} {share} is not within 0 … 1; give a share such as 0.3")
        if self.gpu_memory_utilization == 0:
            raise InputError("--gpu-memory-utilization 0 leaves no memory at all; the default is 0.9")
        for phase in PHASES:
            if (name := self.strategy(phase)) not in STRATEGIES:
                kind = f"order of graph capture (--{phase}-strategy, VLLM_GRAPH_{phase.upper()}_STRATEGY)"
                raise UnknownNameError(kind, name, STRATEGIES)

    def strategy(self, phase: Phase) -> str:
        """Return the name of a phase's capture order."""
        return self.prompt_strategy if phase == "prompt" else self.decode_strategy

    @classmethod
    def of(
        cls, settings: Settings, *, gpu_memory_utilization: float | None = None,
        graph_reserved_mem: float | None = None, graph_prompt_ratio: float | None = None,
        prompt_strategy: str | None = None, decode_strategy: str | None = None,
    ) -> CaptureOptions:  # fmt: skip
        """Resolve options: given arguments first, then environment values in `settings`, then defaults."""
        found: dict[str, float | str | None] = {
            "gpu_memory_utilization": gpu_memory_utilization,
            "graph_reserved_mem": _first(graph_reserved_mem, settings.graph_reserved_mem),
            "graph_prompt_ratio": _first(graph_prompt_ratio, settings.graph_prompt_ratio),
            "prompt_strategy": prompt_strategy or settings.graph_prompt_strategy,
            "decode_strategy": decode_strategy or settings.graph_decode_strategy,
        }
        return cls(**{name: value for name, value in found.items() if value is not None})  # type: ignore[arg-type]


def _first(flag: float | None, variable: float | None) -> float | None:
    return variable if flag is None else flag
