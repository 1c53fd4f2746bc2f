"""Flags that divide a device's memory between KV cache and graphs, with vLLM's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from llmc.cli.options import Command, flag
from llmc.cli.quantities import fraction

if TYPE_CHECKING:
    from llmc.runtime.startup.capturing import CaptureChoice
    from llmc.settings import Settings

UNCAPTURED_SHOWN = 5
"""Uncaptured buckets per phase that a report names; --json and -v name all."""
_SHARES = ("gpu_memory_utilization", "graph_reserved_mem", "graph_prompt_ratio")


_flag = partial(flag, panel="Memory of captured graphs")


@dataclass(frozen=True, kw_only=True)
class CaptureFlags(Command):
    """Graph capture flags; None means not given."""

    gpu_memory_utilization: str | None = _flag(
        None, "F", "Share of the memory left after the profile run to use. Default: 0.9."
    )
    graph_reserved_mem: str | None = _flag(
        None, "F", "Share of that for graphs; 0 for none. Default: VLLM_GRAPH_RESERVED_MEM or 0.1."
    )
    graph_prompt_ratio: str | None = _flag(
        None, "F", "Share of that for prefill graphs. Default: VLLM_GRAPH_PROMPT_RATIO or 0.3."
    )
    prompt_strategy: str | None = _flag(
        None, "min_tokens|max_bs", "Prefill graphs to capture first. Default: VLLM_GRAPH_PROMPT_STRATEGY or min_tokens."
    )
    decode_strategy: str | None = _flag(
        None, "min_tokens|max_bs", "Decode graphs to capture first. Default: VLLM_GRAPH_DECODE_STRATEGY or max_bs."
    )

    def choice(self, settings: Settings) -> CaptureChoice:
        """The capture settings of the flags, and of the environment for flags not given. Raises InputError."""
        from llmc.buckets.capture.options import CaptureOptions
        from llmc.runtime.startup.capturing import CaptureChoice

        typed = self.values(*(one.name for one in fields(CaptureFlags)))
        spelled = {name: f"--{name.replace('_', '-')}" for name in typed}
        given: dict[str, Any] = {
            name: fraction(spelled[name], v) if name in _SHARES else v for name, v in typed.items()
        }
        return CaptureChoice(CaptureOptions.of(settings, **given), tuple(spelled.values()))
