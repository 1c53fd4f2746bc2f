"""How an NVIDIA card runs a step, by --enforce-eager and LLMC_CUDA_GRAPHS.

    eager   graphs   mode
    no      yes      CUDA graphs: packages, or compiled programs, captured under the memory budget; today's default
    no      no       torch.compile: the same, launched kernel by kernel
    yes     any      PyTorch eager mode: operator by operator

A bundle that was finished on its card brings a package for each bucket (package.py); of any other torch.compile makes
a graph of each bucket at the start, which is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.settings import Settings


@dataclass(frozen=True)
class Mode:
    """`eager`: nothing is compiled as a whole, or captured; `graphs`: what is compiled is captured, too."""

    eager: bool
    graphs: bool

    @classmethod
    def of(cls, settings: Settings) -> Mode:
        """As the environment and the flags say."""
        return cls(settings.enforce_eager, settings.cuda_graphs)

    @property
    def captures(self) -> bool:
        """Whether CUDA graphs are captured."""
        return self.graphs and not self.eager

    def __str__(self) -> str:
        if self.eager:
            return "PyTorch eager mode"
        return "CUDA graphs" if self.captures else "torch.compile"
