"""The flags by which a device's memory is divided between KV cache and graphs: vLLM's names and defaults."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from llmc.cli.flags import Command, takes
from llmc.cli.options import option
from llmc.cli.quantities import fraction

if TYPE_CHECKING:
    from llmc.runtime.startup.capturing import CaptureChoice
    from llmc.settings import Settings

UNCAPTURED_SHOWN = 5
"""Buckets of a phase that a report names as uncaptured; --json and -v name all."""
_SHARES = ("gpu_memory_utilization", "graph_reserved_mem", "graph_prompt_ratio")


def _option(metavar: str, text: str) -> Any:
    return option("", metavar, text, rich_help_panel="Memory of captured graphs")


@dataclass(frozen=True)
class CaptureFlags:
    """The flags as typed; None is a flag that was not given."""

    gpu_memory_utilization: Annotated[
        str | None, _option("F", "Share of the memory free after the profile run to use. Default: 0.9.")
    ] = None
    graph_reserved_mem: Annotated[
        str | None, _option("F", "Share of that for graphs; 0: none. Default: VLLM_GRAPH_RESERVED_MEM or 0.1.")
    ] = None
    graph_prompt_ratio: Annotated[
        str | None, _option("F", "Share of that for prompt graphs. Default: VLLM_GRAPH_PROMPT_RATIO or 0.3.")
    ] = None
    prompt_strategy: Annotated[
        str | None,
        _option(
            "min_tokens|max_bs", "Prompt graphs captured first. Default: VLLM_GRAPH_PROMPT_STRATEGY or min_tokens."
        ),
    ] = None
    decode_strategy: Annotated[
        str | None,
        _option("min_tokens|max_bs", "Decode graphs captured first. Default: VLLM_GRAPH_DECODE_STRATEGY or max_bs."),
    ] = None

    def choice(self, settings: Settings) -> CaptureChoice:
        """What the flags ask for, and the environment where they do not. Raises InputError."""
        from llmc.buckets.capture.options import CaptureOptions
        from llmc.runtime.startup.capturing import CaptureChoice

        typed = {name: value for name, value in asdict(self).items() if value is not None}
        spelled = {name: f"--{name.replace('_', '-')}" for name in typed}
        given: dict[str, Any] = {
            name: fraction(spelled[name], v) if name in _SHARES else v for name, v in typed.items()
        }
        return CaptureChoice(CaptureOptions.of(settings, **given), tuple(spelled.values()))


def takes_capture_flags(command: Command) -> Command:
    """`command`, whose parameter `flags` is a CaptureFlags, as a command line function with one option for each."""
    return takes(CaptureFlags, command)
