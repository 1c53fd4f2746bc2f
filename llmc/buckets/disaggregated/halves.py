"""The two halves of a plan: one for the prefill device, one for the decode device."""

from __future__ import annotations

from dataclasses import replace

from llmc.buckets.bucket import Bucket, Phase
from llmc.buckets.plan import Note, Plan
from llmc.errors import InputError


def half(plan: Plan, phase: Phase) -> Plan:
    """Return the plan with all buckets of `phase`, and the one bucket of the other phase that serves everything.

    Neither device then compiles graphs that only the other one runs, and each can still serve a request by itself, for
    example when the other is gone. Raises InputError for a plan that does not cover its limits.
    """
    one = _every_decode(plan) if phase == "prompt" else _every_prompt(plan)
    kept = plan.of(phase)
    dropped = len(plan.buckets) - len(kept) - 1
    other: Phase = "decode" if phase == "prompt" else "prompt"
    note = Note("dropped", f"the other device runs them; {one} serves all of them alone", other, dropped)
    notes = (*plan.provenance.notes, note) if dropped else plan.provenance.notes
    return Plan(plan.limits, (*kept, one), replace(plan.provenance, notes=notes))


def _every_decode(plan: Plan) -> Bucket:
    found = plan.lookup("decode", plan.limits.max_num_seqs, 1, plan.limits.longest_past)
    if found is None:
        raise InputError("the plan has no decode bucket that covers its limits; plan anew")
    return found


def _every_prompt(plan: Plan) -> Bucket:
    """Of the prompt buckets that reach the longest prompt, in chunks if needed: fewest rows, then fewest steps."""
    reaching = [b for b in plan.prompt if plan.limits.reach(b) >= plan.limits.longest_prompt]
    if not reaching:
        raise InputError("the plan has no prompt bucket that reaches its longest prompt; plan anew")
    return min(reaching, key=lambda b: (b.batch, -b.query, b.context))
