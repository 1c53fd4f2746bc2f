"""What schedulers refuse when they are made, and of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmc.buckets.coverage import prove
from llmc.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from llmc.buckets.limits import Limits
    from llmc.buckets.plan import Plan
    from llmc.runtime.engine.scheduling.base import SchedulerConfig


def check_config(plan: Plan, config: SchedulerConfig) -> None:
    """Raise InputError, naming the field, for a config that is out of range or does not fit the plan, and ArtifactError
    for a plan with gaps that no exact shape fills."""
    limits = plan.limits
    for name, value, least, most, why in (
        ("max_num_seqs", config.max_num_seqs, 1, limits.max_num_seqs, "the plan's max_num_seqs"),
        ("slots", config.slots, config.max_num_seqs, None, "max_num_seqs"),
        ("prompt_chunk", 1 if config.prompt_chunk is None else config.prompt_chunk, 1, None, ""),
        ("prefill_budget", config.prefill_budget, 1, None, ""),
        ("min_prefix", config.min_prefix, 0, None, ""),
        ("overtake", config.overtake, 0, None, ""),
        ("block_tokens", config.block_tokens, 1, None, ""),
    ):
        if value < least:
            raise InputError(f"{name} {value} must be at least {least}" + (f" ({why})" if most is None and why else ""))
        if most is not None and value > most:
            raise InputError(f"{name} {value} is more than {why}, {most}; lower it or plan anew")
    if config.cache_tokens is not None:
        if not config.ragged:
            raise InputError(
                f"cache_tokens {config.cache_tokens}: only a ragged executor's slots share a pool of tokens"
            )
        if config.cache_tokens < config.block_tokens:
            raise InputError(
                f"cache_tokens {config.cache_tokens} is less than one block of {config.block_tokens} tokens; "
                "give the KV cache more space"
            )
    gaps = [] if config.exact else prove(plan.limits, plan.buckets)
    if gaps:
        raise ArtifactError(f"the plan has no bucket for {gaps[0]}; plan anew and compile again")


def check_prompt(limits: Limits, prompt: Sequence[int]) -> None:
    """Raise InputError for a prompt that is empty or longer than the plan admits, naming the limit."""
    length = len(prompt)
    if not 1 <= length <= limits.longest_prompt:
        name = "max_model_len - 1" if limits.max_prompt_len is None else "max_prompt_len"
        raise InputError(f"the prompt has {length} tokens; {name} allows 1 to {limits.longest_prompt}")
