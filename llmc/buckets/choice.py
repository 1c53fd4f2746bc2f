"""Choosing a plan's buckets from what strategies propose, by traffic and within a budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from llmc.buckets.bucket import PHASES, Bucket, Phase
from llmc.buckets.budget import DEFAULT_MAX_GRAPHS, Budget, GraphCosts, spend
from llmc.buckets.candidates import Candidates
from llmc.buckets.evaluation import evaluate
from llmc.buckets.limits import Limits
from llmc.buckets.objective import Objective, Tokens
from llmc.buckets.plan import Plan
from llmc.buckets.proposal import Proposal
from llmc.buckets.provenance import Fact, Note, Provenance
from llmc.buckets.selection import Chosen, PhaseProblem
from llmc.buckets.traffic.demand import Observed, observe, uniform, ways
from llmc.buckets.traffic.events import DecodeRun, PromptGroup
from llmc.buckets.traffic.grouping import FreeGrouping, Grouping, PlanGrouping


class TrafficSource(Protocol):
    """Recorded requests, and how they are served."""

    cached_requests: int
    """Requests of which the cache held a part, once `events` has ended."""

    @property
    def objective(self) -> Objective:
        """What steps cost."""
        ...

    def events(self, limits: Limits, prompt_batch: int) -> Iterator[PromptGroup | DecodeRun]:
        """The schedule of the requests under `limits`, at most `prompt_batch` prompts admitted at a time."""
        ...

    def facts(self) -> dict[str, Fact]:
        """What was read, for the plan's provenance; complete once `events` has ended."""
        ...

    def notes(self) -> list[str]:
        """What the user should know about the requests; complete once `events` has ended."""
        ...


def choose(
    limits: Limits, proposal: Proposal, traffic: TrafficSource | None, budget: Budget, costs: GraphCosts | None
) -> tuple[list[Bucket], list[Note], dict[str, Fact]]:
    """The plan's buckets, notes on what was chosen and left out, and facts for the provenance.

    Without a budget, what a rule proposes is the plan; traffic then only says what it wastes.
    """
    notes = [*(note for phase in PHASES for note in proposal.notes.get(phase, [])), *proposal.completions]
    if not proposal.free and not budget.given():
        whole = [bucket for phase in PHASES for bucket in proposal.buckets[phase]]
        facts = {} if traffic is None else _judged(Plan(limits, tuple(whole), Provenance("part")), traffic)
        if traffic is not None:
            notes += [Note("warning", text) for text in traffic.notes()]
        return whole, notes, facts
    problems = open_problems(limits, proposal, traffic)
    by_rule: list[Bucket] = []
    if not budget.given():
        by_rule = [bucket for phase, buckets in proposal.buckets.items() for bucket in buckets]
        problems = {phase: problem for phase, problem in problems.items() if phase in proposal.free}
    chosen = spend(budget, problems, costs, DEFAULT_MAX_GRAPHS)
    if traffic is not None:
        notes += [Note("warning", text) for text in traffic.notes()]
        if (
            traffic.cached_requests
            and "prompt" in problems
            and limits.contexts
            and not problems["prompt"].candidates.values[2].any()
        ):
            text = (
                f"{traffic.cached_requests} prompts find a part of themselves in the cache and compute it again, since "
                "prompt buckets have context 0; give --prompt-context MIN,STEP,MAX to take over there"
            )
            notes.append(Note("warning", text, "prompt"))
    facts = {} if traffic is None else traffic.facts()
    for phase, choice in chosen.items():
        notes += _notes(phase, proposal, choice, budget, traffic is not None)
        facts |= _facts(phase, choice)
    return [*by_rule, *(bucket for choice in chosen.values() for bucket in choice.buckets)], notes, facts


def open_problems(limits: Limits, proposal: Proposal, traffic: TrafficSource | None) -> dict[Phase, PhaseProblem]:
    """The choice that each phase leaves, with the demand of `traffic` (None: every admissible request once)."""
    known: dict[Phase, Candidates] = {
        phase: proposal.free[phase] if phase in proposal.free else Candidates.of(phase, limits, proposal.buckets[phase])
        for phase in PHASES
    }
    parts = ways(known["prompt"])
    if traffic is None:
        observed: dict[Phase, list[Observed]] = {
            "prompt": [uniform(part, int(known["prompt"].values[0][-1])) for part in parts],
            "decode": [uniform(known["decode"], int(known["decode"].values[0][-1]))],
        }
        objective: Objective = Tokens()
    else:
        events = traffic.events(limits, int(known["prompt"].values[0][-1]))
        observed = observe(events, [(part, _grouping(part)) for part in parts], known["decode"])
        objective = traffic.objective
    return {phase: PhaseProblem(known[phase], observed[phase], objective) for phase in PHASES}


def _grouping(prompt: Candidates) -> Grouping:
    if prompt.members is None:
        return FreeGrouping(prompt)
    limits = prompt.limits
    decode = Bucket("decode", limits.max_num_seqs, 1, limits.read(limits.max_model_len))
    return PlanGrouping(Plan(limits, (*(Bucket("prompt", *m) for m in prompt.members), decode), Provenance("part")))


def _notes(phase: Phase, proposal: Proposal, choice: Chosen, budget: Budget, recorded: bool) -> list[Note]:
    notes = []
    if phase not in proposal.free:
        dropped = len(proposal.buckets[phase]) - len(choice.buckets)
        if dropped:
            demand = "the recorded traffic" if recorded else "every admissible request, all equally likely"
            text = f"the {len(choice.buckets)} kept waste least on {demand} ({', '.join(budget.given())})"
            notes.append(Note("dropped", text, phase, dropped))
    return notes


def _judged(plan: Plan, traffic: TrafficSource) -> dict[str, Fact]:
    """What a finished plan wastes on the traffic, as facts."""
    found = evaluate(plan, traffic.events(plan.limits, plan.prompt[-1].batch))
    facts = traffic.facts()
    for one in (found.prompt, found.decode):
        facts[f"{one.phase}_steps"] = one.steps
        if one.waste is not None and one.ragged_waste is not None:
            facts[f"{one.phase}_waste"] = round(one.waste, 6)
            facts[f"{one.phase}_ragged_waste"] = round(one.ragged_waste, 6)
    return facts


def _facts(phase: Phase, choice: Chosen) -> dict[str, Fact]:
    facts: dict[str, Fact] = {f"{phase}_steps": int(choice.steps), f"{phase}_gap": round(choice.gap, 6)}
    if choice.waste is not None:
        facts[f"{phase}_waste"] = round(choice.waste, 6)
        facts[f"{phase}_ragged_waste"] = round(choice.ragged, 6)
    return facts
