"""Who compiled what: the bridge's counter `graph_compilation` around each step.

A step after the start that compiled has met a shape that nothing warmed: it is named and counted, by the executor's
counter, which the engine warns of. The guide's variables log more:

    VLLM_HPU_LOG_STEP_GRAPH_COMPILATION[_ALL]   the stats of each step that compiled [of each step]
    VLLM_HPU_LOG_STEP_CPU_FALLBACKS[_ALL]       of each step of which operators ran on the host [of each step]

The lines are vLLM's: HabanaAI/vllm-fork, vllm/executor/habana_executor.py (2024).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from llmc.runtime.executors.hpu.habana import COMPILED, FELL_BACK, number
from llmc.runtime.executors.witness import Witness

if TYPE_CHECKING:
    from llmc.runtime.executors.compilations import CompilationCounter
    from llmc.runtime.executors.hpu.habana import Card
    from llmc.settings import Settings

_log = logging.getLogger("llmc")


class CompilationWatch:
    """Counts what the card compiles, by what made it do so."""

    def __init__(self, card: Card, counter: CompilationCounter, settings: Settings) -> None:
        self._card, self._counter = card, counter
        self._compilations, self._fallbacks = settings.log_step_compilations, settings.log_step_fallbacks

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Count what is compiled inside as `what`'s."""
        with ExitStack() as stack:
            compiled = stack.enter_context(self._card.counting(COMPILED))
            fallbacks = stack.enter_context(self._card.counting(FELL_BACK)) if self._fallbacks != "none" else None
            yield
        for _ in range(number(stats := compiled())):
            self._counter.opened(f"hpu: {what}")
        if self._compilations == "all" or (self._compilations == "some" and number(stats)):
            _log.warning("VLLM_HPU_STEP_GRAPH_COMPILATION: %s, %s", stats, what)
        if fallbacks is not None and (self._fallbacks == "all" or number(fallbacks())):
            _log.warning("VLLM_HPU_STEP_CPU_FALLBACK: %s, %s", fallbacks(), what)


class GraphCompilations(Witness):
    """The bridge's global counter: every graph that its compiler compiled in this process, whoever asked for it."""

    name = "hpu.metrics graph_compilation"

    def __init__(self, card: Card) -> None:
        self._card = card
        self._first = card.compilations()

    def what(self) -> Sequence[str]:
        """The bridge counts, and does not name them."""
        return ("a graph",) * (self._card.compilations() - self._first)
