"""How a Gaudi runs a step: the guide's table, by PT_HPU_LAZY_MODE and --enforce-eager.

    PT_HPU_LAZY_MODE   eager   mode
    0                  no      torch.compile, one graph a bucket, compiled by hpu_backend; today's default
    0                  yes     PyTorch eager mode
    1                  no      HPU graphs, captured under the memory budget; what is not captured runs lazily
    1                  yes     PyTorch lazy mode

Source: the Gaudi guide of vLLM, "Execution modes"; the default of 0 is vllm-gaudi's since 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.settings import Settings


@dataclass(frozen=True)
class Mode:
    """`lazy` is the bridge's mode; `eager`: nothing is compiled as a whole, or captured."""

    lazy: bool
    eager: bool

    @classmethod
    def of(cls, settings: Settings) -> Mode:
        """As the environment and the flags say."""
        return cls(settings.hpu_lazy_mode, settings.enforce_eager)

    @property
    def compiles(self) -> bool:
        """Whether torch.compile makes a graph of each bucket."""
        return not self.lazy and not self.eager

    @property
    def captures(self) -> bool:
        """Whether HPU graphs are captured."""
        return self.lazy and not self.eager

    def __str__(self) -> str:
        if self.compiles:
            return "torch.compile"
        if self.captures:
            return "HPU Graphs"
        return "PyTorch lazy mode" if self.lazy else "PyTorch eager mode"
