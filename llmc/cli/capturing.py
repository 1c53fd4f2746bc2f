"""The flags by which a device's memory is divided between KV cache and graphs: vLLM's names and defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from llmc.cli.options import option
from llmc.cli.quantities import fraction

if TYPE_CHECKING:
    from llmc.runtime.startup.capturing import CaptureChoice
    from llmc.settings import Settings

UNCAPTURED_SHOWN = 5
"""Buckets of a phase that a report names as uncaptured; --json and -v name all."""
_PANEL = "Memory of a device that captures graphs"

Utilization = Annotated[
    str | None,
    option("", "F", "Share of the memory free after the profile run to use. Default: 0.9.", rich_help_panel=_PANEL),
]
ReservedMem = Annotated[
    str | None,
    option(
        "", "F", "Share of that for graphs; 0: none. Default: VLLM_GRAPH_RESERVED_MEM or 0.1.", rich_help_panel=_PANEL
    ),
]
PromptRatio = Annotated[
    str | None,
    option(
        "", "F", "Share of that for prompt graphs. Default: VLLM_GRAPH_PROMPT_RATIO or 0.3.", rich_help_panel=_PANEL
    ),
]
PromptStrategy = Annotated[
    str | None,
    option(
        "",
        "min_tokens|max_bs",
        "Prompt graphs captured first. Default: VLLM_GRAPH_PROMPT_STRATEGY or min_tokens.",
        rich_help_panel=_PANEL,
    ),
]
DecodeStrategy = Annotated[
    str | None,
    option(
        "",
        "min_tokens|max_bs",
        "Decode graphs captured first. Default: VLLM_GRAPH_DECODE_STRATEGY or max_bs.",
        rich_help_panel=_PANEL,
    ),
]


def capture_choice(
    settings: Settings, gpu_memory_utilization: str | None, graph_reserved_mem: str | None,
    graph_prompt_ratio: str | None, prompt_strategy: str | None, decode_strategy: str | None,
) -> CaptureChoice:  # fmt: skip
    """What the flags ask for, and the environment where they do not. Raises InputError."""
    from llmc.buckets.warmup.options import CaptureOptions
    from llmc.runtime.startup.capturing import CaptureChoice

    flags = {
        "--gpu-memory-utilization": gpu_memory_utilization, "--graph-reserved-mem": graph_reserved_mem,
        "--graph-prompt-ratio": graph_prompt_ratio, "--prompt-strategy": prompt_strategy,
        "--decode-strategy": decode_strategy,
    }  # fmt: skip
    options = CaptureOptions.of(
        settings,
        gpu_memory_utilization=fraction("--gpu-memory-utilization", gpu_memory_utilization),
        graph_reserved_mem=fraction("--graph-reserved-mem", graph_reserved_mem),
        graph_prompt_ratio=fraction("--graph-prompt-ratio", graph_prompt_ratio),
        prompt_strategy=prompt_strategy,
        decode_strategy=decode_strategy,
    )
    return CaptureChoice(options, tuple(flag for flag, value in flags.items() if value is not None))
