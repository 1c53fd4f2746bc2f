"""From an opened bundle to an engine that takes requests: one way for LLM, AsyncLLM and the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.runtime.engine import Engine
from llmc.runtime.generator import Generator
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.base import Executor
    from llmc.runtime.observer import Observer
    from llmc.runtime.sampling.guided import ConstraintFactory


@dataclass(frozen=True)
class EngineOptions:
    """How to run a bundle.

    `threads` defaults to LLMC_THREADS or the CPUs this process may use. `prefill_budget` (tokens; None: the
    scheduler's) bounds what a prompt may hold up running sequences by. `prefix_slots`: finished prompts that outlive a
    full batch in slots of their own, which cost memory once they are used; `enable_prefix_caching`: whether prefixes
    are reused at all.
    """

    threads: int | None = None
    prefill_budget: int | None = None
    prefix_slots: int = 2
    enable_prefix_caching: bool = True


def open_executor(bundle: Bundle, options: EngineOptions) -> Executor:
    """The bundle's executor, with a slot for each sequence that may run and for the prefixes kept beside."""
    extra = options.prefix_slots if options.enable_prefix_caching else 0
    return bundle.executor(bundle.plan.limits.max_num_seqs + extra, options.threads)


def open_generator(
    bundle: Bundle, executor: Executor, options: EngineOptions, observer: Observer | None = None
) -> Generator:
    """A generator over an executor of the bundle."""
    vocab_size = int(bundle.manifest.model["vocab_size"])
    engine = Engine(
        bundle.plan, executor, vocab_size, prefill_budget=options.prefill_budget,
        min_prefix=None if options.enable_prefix_caching else 0,
        on_compilation="refuse" if Settings.from_environment().check_recompilation else "warn",
    )  # fmt: skip
    if "tokenizer.json" not in bundle.manifest.files:
        return Generator(engine, observer=observer)

    def constraints() -> ConstraintFactory:
        from llmc.runtime.sampling.guided import ConstraintFactory

        return ConstraintFactory(bundle.files.read("tokenizer.json").decode(), vocab_size, bundle.eos_token_ids)

    return Generator(engine, bundle.tokenizer, constraints, observer)
