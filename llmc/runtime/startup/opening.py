"""From an opened bundle to an engine that takes requests; shared by LLM, AsyncLLM and the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.log import logger
from llmc.errors import InputError
from llmc.runtime import executors
from llmc.runtime.bundle import Bundle
from llmc.runtime.confined.limits import ChildLimits
from llmc.runtime.executors.compatibility import warn_in_place_of

if TYPE_CHECKING:
    from llmc.buckets.capture.options import CaptureOptions
    from llmc.runtime.engine.core import EngineCore
    from llmc.runtime.engine.engine import LLMEngine
    from llmc.runtime.engine.observer import Observer
    from llmc.runtime.engine.sampling.constraints import ConstraintFactory
    from llmc.runtime.engine.speculation import SpeculativeConfig
    from llmc.runtime.executors.base import Executor


@dataclass(frozen=True)
class EngineOptions:
    """How to run a bundle.

    - `threads`: default LLMC_THREADS, or the CPUs this process may use.
    - `prefill_budget`: prefill tokens that may delay running sequences; None: the scheduler's default.
    - `prefix_slots`: extra slots that keep finished prompts while the batch is full; they use memory once filled.
    - `enable_prefix_caching`: whether prefixes are reused at all.
    - `speculative_config`: vLLM's, for its method "ngram", see SpeculativeConfig; None: no speculation.
    - `grammar_limits`: limits of compiling a request's grammar; None: from the environment.
    - `prefill`: a bundle of the same checkpoint, or the address of `llmc prefill`, that computes the prompts and
      transfers their KV cache (docs/disaggregated.md).
    - `enforce_eager`: run steps without compiled or captured graphs, if the device can.
    - `warm_up`: run every bucket before the first request, and divide memory and capture graphs if the device does,
      like a server. CaptureOptions set the details; True takes them from the environment.
    """

    threads: int | None = None
    prefill_budget: int | None = None
    prefix_slots: int = 2
    enable_prefix_caching: bool = True
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None
    grammar_limits: ChildLimits | None = None
    prefill: str | Path | None = None
    enforce_eager: bool = False
    warm_up: bool | CaptureOptions = False

    def __post_init__(self) -> None:
        if self.speculative_config is not None:
            from llmc.runtime.engine.speculation import SpeculativeConfig

            object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The parsed `speculative_config`."""
        return self.speculative_config  # type: ignore[return-value] # __post_init__ converts it


def open_executor(bundle: Bundle, options: EngineOptions) -> Executor:
    """Open the bundle's executor, with slots for all running sequences and for kept prefixes.

    Raises InputError if speculation is requested and the executor cannot verify drafts.
    """
    if options.enforce_eager:
        bundle = Bundle(bundle.files, replace(bundle.settings, enforce_eager=True))
    extra = options.prefix_slots if options.enable_prefix_caching else 0
    executor = executors.open_executor(bundle, bundle.plan.limits.max_num_seqs + extra, options.threads)
    warn_in_place_of(bundle, executor.capabilities.in_place_of)
    if options.enforce_eager and not executor.capabilities.eager:
        logger().warning(
            "%s: enforce_eager has no effect on %s here: every step replays a compiled graph",
            bundle.path, bundle.manifest.device,
        )  # fmt: skip
    if options.speculation is not None:
        from llmc.runtime.engine.speculation import require_verifiable

        try:
            require_verifiable(executor)
        except InputError:
            executor.close()
            raise
    return executor


def warm_up(executor: Executor, options: EngineOptions) -> None:
    """Run every bucket and capture graphs as `options` say, before there is an engine.

    Raises a bucket's error, InputError if the cache has no room for one sequence, and KeyboardInterrupt.
    """
    if not options.warm_up:
        return
    from llmc.buckets.capture.options import CaptureOptions
    from llmc.runtime.startup.capturing import CaptureChoice, Capturing
    from llmc.runtime.startup.outcome import WarmUpOutcome
    from llmc.runtime.startup.warming import Warming

    bundle, chosen = executor.bundle, options.warm_up
    capture = CaptureOptions.of(bundle.settings) if isinstance(chosen, bool) else chosen
    outcome = WarmUpOutcome(
        executor, Warming(executor, bundle.plan), Capturing.of(executor, bundle.plan, CaptureChoice(capture))
    )
    outcome.run()
    if outcome.interrupted:
        raise KeyboardInterrupt
    for error in outcome.failed.values():
        raise error


def open_engine(
    bundle: Bundle, executor: Executor, options: EngineOptions, observer: Observer | None = None
) -> LLMEngine:
    """Open an engine over an executor of the bundle, and over the requested prefill side, which the engine closes.

    Raises ArtifactError or DeviceError if the prefill side cannot be opened or does not fit the bundle.
    """
    from llmc.runtime.engine.engine import LLMEngine

    vocab_size, settings = bundle.size("vocab_size"), bundle.settings
    limits = options.grammar_limits or ChildLimits(settings.grammar_seconds, settings.grammar_memory << 20)
    engine = open_core(bundle, executor, options)
    if "tokenizer.json" not in bundle.manifest.files:
        return LLMEngine(engine, observer=observer)

    def constraints(at_once: bool) -> ConstraintFactory:
        from llmc.runtime.engine.sampling.constraints import ConstraintFactory

        text = bundle.files.read("tokenizer.json").decode()
        return ConstraintFactory(text, vocab_size, bundle.eos_token_ids, limits, at_once=at_once)

    return LLMEngine(engine, bundle.tokenizer, constraints, observer)


def open_core(bundle: Bundle, executor: Executor, options: EngineOptions) -> EngineCore:
    """Open the engine core: the one with scheduler and samplers, or the one for devices that sample."""
    from llmc.runtime.engine.batched_core import BatchedCore
    from llmc.runtime.executors.generating import GeneratingExecutor

    vocab_size, prefill = bundle.size("vocab_size"), options.prefill or bundle.prefill
    if isinstance(executor, GeneratingExecutor):
        from llmc.runtime.engine.sequential_core import SequentialCore

        if prefill is not None:
            raise InputError(
                f"{bundle.path}: its device {bundle.manifest.device} takes whole prompts and keeps its cache, "
                f"so {prefill} cannot transfer keys and values to it; leave --prefill out"
            )
        return SequentialCore(bundle.plan, executor, vocab_size)
    min_prefix = None if options.enable_prefix_caching else 0
    prefiller = None
    if prefill is not None:
        from llmc.runtime.disaggregated.opening import open_prefiller

        prefiller = open_prefiller(prefill, bundle, executor, lambda other: open_executor(other, options), min_prefix)
        min_prefix = 0  # the prefill side keeps prefixes; copies here would only cost time
    return BatchedCore(
        bundle.plan, executor, vocab_size, prefill_budget=options.prefill_budget, min_prefix=min_prefix,
        on_compilation="refuse" if bundle.settings.check_recompilation else "warn",
        speculation=options.speculation, prefiller=prefiller,
    )  # fmt: skip
