"""Making a plan: ranges, their product, filters, and the buckets that coverage still needs."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.buckets import ranges
from llmc.buckets.bucket import Bucket, Phase
from llmc.buckets.coverage import gaps
from llmc.buckets.grid import decode_grid, prompt_grid
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.provenance import Note, Provenance
from llmc.buckets.strategies import DEFAULT_STRATEGY, create
from llmc.buckets.strategies.base import Dimension, Range
from llmc.errors import InputError
from llmc.settings import Settings


def make_plan(
    limits: Limits,
    strategy: str | None = None,
    *,
    prompt_batch: Range | None = None,
    prompt_query: Range | None = None,
    prompt_context: Range | None = None,
    decode_batch: Range | None = None,
    decode_context: Range | None = None,
    settings: Settings | None = None,
    limit_origins: Mapping[str, str] | None = None,
) -> Plan:
    """A plan that covers every request `limits` admit; equal arguments give equal plans.

    A range or strategy given here wins over `settings` (default: an empty environment), and that over the
    strategy's defaults. Contexts are in tokens per sequence: a decode bucket here gives each of its sequences
    the same context, so its default runs from block_size to max_model_len, not over the blocks of a whole
    batch. `limit_origins` says where each limit comes from, for the provenance only.

    The buckets are the product of the dimensions' values without those that break a limit or that no
    admissible request needs. Then come the fewest that coverage lacks: a bucket (1, largest query, context)
    through which longer prompts run in chunks, a decode bucket of max_num_seqs with the longest context. All
    of it is in `provenance.notes`, with counts and reasons.

    Raises UnknownNameError for a strategy without a registry entry, InputError for ranges that are none, that
    make too many buckets, or of which no bucket of a phase is left.
    """
    settings = settings or Settings()
    name, origin = _strategy_name(strategy, settings)
    rule = create(name)
    flags: dict[Dimension, Range | None] = {
        "prompt_batch": prompt_batch,
        "prompt_query": prompt_query,
        "prompt_context": prompt_context,
        "decode_batch": decode_batch,
        "decode_context": decode_context,
    }
    chosen, origins = ranges.resolve(limits, flags, rule.defaults(limits), settings)
    prompt, prompt_notes = prompt_grid(limits, rule, chosen)
    decode, decode_notes = decode_grid(limits, rule, chosen)
    _require_some("prompt", prompt, prompt_notes)
    _require_some("decode", decode, decode_notes)
    added, added_notes = _complete(limits, prompt, decode)
    notes = [*_warnings(settings), *prompt_notes, *decode_notes, *added_notes]
    provenance = Provenance(
        name,
        {
            dimension: {"min": bounds.min, "step": bounds.step, "max": bounds.max}
            for dimension, bounds in chosen.items()
        },
        {"strategy": origin, **(limit_origins or {}), **origins},
        tuple(notes),
    )
    return Plan(limits, (*prompt, *decode, *added), provenance)


def _strategy_name(strategy: str | None, settings: Settings) -> tuple[str, str]:
    if strategy is not None:
        return strategy, "flag"
    if settings.strategy is not None:
        return settings.strategy, "environment VLLM_BUCKETING_STRATEGY"
    return DEFAULT_STRATEGY, "default"


def _warnings(settings: Settings) -> list[Note]:
    notes = [Note("warning", text) for text in settings.warnings]
    if settings.bucket_file is not None:
        text = "VLLM_BUCKETING_FROM_FILE is ignored: the buckets come from ranges"
        notes.append(Note("warning", text))
    return notes


def _require_some(phase: Phase, buckets: list[Bucket], notes: list[Note]) -> None:
    if not buckets:
        reasons = "; ".join(f"{note.count}: {note.text}" for note in notes if note.kind == "dropped")
        raise InputError(
            f"no {phase} bucket is left, so the plan covers nothing (dropped {reasons or 'none'}); "
            f"change the {phase} ranges or the limits"
        )


def _complete(limits: Limits, prompt: list[Bucket], decode: list[Bucket]) -> tuple[list[Bucket], list[Note]]:
    """At most one bucket a phase, which closes every gap of it: see `coverage` for why one is enough."""
    added: list[Bucket] = []
    notes: list[Note] = []
    prompt_gaps = gaps(limits, prompt, "prompt")
    if prompt_gaps:
        query = max(bucket.query for bucket in prompt)
        bucket = Bucket("prompt", 1, query, _in_blocks(limits, limits.longest_prompt - query))
        low, high = prompt_gaps[0].lengths
        added.append(bucket)
        notes.append(
            Note("added", f"{bucket}, prompts of {low} to {high} tokens run through it in chunks", "prompt", 1)
        )
    decode_gaps = gaps(limits, decode, "decode")
    if decode_gaps:
        enough = [bucket.context for bucket in decode if bucket.context >= limits.longest_past]
        context = min(enough, default=_in_blocks(limits, limits.longest_past))
        bucket = Bucket("decode", limits.max_num_seqs, 1, context)
        added.append(bucket)
        notes.append(Note("added", f"{bucket}, for {'; '.join(map(str, decode_gaps))}", "decode", 1))
    return added, notes


def _in_blocks(limits: Limits, tokens: int) -> int:
    """`tokens` rounded up to whole blocks, at most max_model_len."""
    return min(-(-tokens // limits.block_size) * limits.block_size, limits.max_model_len)
