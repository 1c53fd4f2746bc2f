"""Planning: each phase's strategy and its proposal, the choice of buckets, and the buckets that coverage adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.buckets.bucket import PHASES, Bucket, Phase
from llmc.buckets.cost.objective import Objective, Tokens
from llmc.buckets.evaluation.replay import replay
from llmc.buckets.limits import Limits
from llmc.buckets.lookup import BucketSet
from llmc.buckets.plan import Fact, Note, Plan, Provenance
from llmc.buckets.planner import bucket_file, ranges
from llmc.buckets.planner.bucket_file import BucketFile
from llmc.buckets.planner.budget import DEFAULT_MAX_GRAPHS, Budget, GraphCosts, spend
from llmc.buckets.planner.candidates import Candidates
from llmc.buckets.planner.choice import COUNTS, Chosen, FrontierPoint, PhaseProblem, points
from llmc.buckets.planner.demand import FreeGrouping, Grouping, Observed, PlanGrouping, observe, uniform, ways
from llmc.buckets.planner.rules import Axes, Proposal, axes, complete, free_candidates, grid, require_some
from llmc.buckets.strategies import DEFAULT_STRATEGY, FILE, TRAFFIC, create
from llmc.buckets.strategies.base import DIMENSIONS, Dimension, Range, Strategy
from llmc.errors import InputError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.buckets.traffic.source import Traffic


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of a plan, except its budget. `flags` are given ranges, contexts in tokens per sequence.

    A range, file or strategy given here takes precedence over `settings`, and those over the strategy's defaults.
    `max_seq_len_to_capture` is the length in tokens up to which lengths get buckets of their own by default.
    """

    limits: Limits
    strategy: str | None = None
    flags: Mapping[Dimension, Range | None] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    bucket_file: BucketFile | None = None
    traffic: Traffic | None = None
    max_seq_len_to_capture: int | None = None


def make_plan(
    limits: Limits,
    strategy: str | None = None,
    *,
    settings: Settings | None = None,
    limit_origins: Mapping[str, str] | None = None,
    budget: Budget | None = None,
    bucket_file: BucketFile | None = None,
    traffic: Traffic | None = None,
    **ranges_given: Range | None,
) -> Plan:
    """Run `plan_from` with the ranges as keyword arguments.

    The ranges are prompt_batch, prompt_query, prompt_context, decode_batch and decode_context.
    """
    flags = {dimension: ranges_given.pop(dimension, None) for dimension in DIMENSIONS}
    if ranges_given:
        raise TypeError(f"make_plan has no argument {', '.join(ranges_given)}")
    inputs = PlanInputs(limits, strategy, flags, settings or Settings(), bucket_file, traffic)
    return plan_from(inputs, budget or Budget(), None, limit_origins or {})


def plan_from(
    inputs: PlanInputs, budget: Budget, graph_costs: GraphCosts | None, limit_origins: Mapping[str, str]
) -> Plan:
    """Create a plan that covers every request the limits admit; equal arguments give equal plans.

    Contexts are in tokens per sequence: a decode bucket here gives each of its sequences the same context, so its
    default runs from block_size to max_model_len, not over the blocks of a whole batch. `limit_origins` is the origin
    of each limit, only for the provenance.

    A rule's buckets are the product of the dimensions' values without those that break a limit or that no admissible
    request needs. The fewest buckets that coverage lacks are added: a bucket (1, largest query, context) through which
    longer prompts run in chunks, a decode bucket of max_num_seqs with the longest context. With a `budget`, or for the
    strategy "traffic", the best few of these are chosen by the traffic's demand; without traffic every admissible step
    counts the same. `provenance.notes` records all changes, with counts and reasons.

    Raises UnknownNameError for an unknown strategy. Raises InputError for invalid ranges, ranges that give too many
    buckets or none for a phase, an unusable file or trace, and a budget that no plan meets.
    """
    proposal = _propose(inputs)
    buckets, notes, facts = choose(inputs.limits, proposal, inputs.traffic, budget, graph_costs)
    if not inputs.limits.contexts and not proposal.free and not budget.given() and inputs.bucket_file is None:
        notes += _without_contexts(inputs, proposal)
    provenance = Provenance(
        proposal.name,
        {dimension: bounds.numbers() for dimension, bounds in proposal.ranges.values.items()},
        {**proposal.origins, **limit_origins, **proposal.ranges.origins},
        (*_warnings(inputs.settings, proposal), *notes),
        facts,
    )
    return Plan(inputs.limits, tuple(buckets), provenance)


def frontier_from(inputs: PlanInputs, counts: Sequence[int] = COUNTS) -> list[FrontierPoint]:
    """Return the least padding for each number of graphs per phase. Raises like `plan_from`."""
    return points(open_problems(inputs.limits, _propose(inputs), inputs.traffic), counts)


def _without_contexts(inputs: PlanInputs, proposal: Proposal) -> list[Note]:
    """Notes on the contexts that the rules would add for a model whose graphs read cached tokens."""
    try:
        whole = _propose(replace(inputs, limits=inputs.limits.reading(True)))
    except InputError:  # too many
        return []
    text = "the model has only recurrent state, so its graphs need no contexts: {} in place of {}"
    return [
        Note("dropped", text.format(len(few), len(many)), phase, len(many) - len(few))
        for phase in PHASES
        if len(many := whole.buckets.get(phase, [])) > len(few := proposal.buckets[phase])
    ]


def _propose(inputs: PlanInputs) -> Proposal:
    settings, file = inputs.settings, inputs.bucket_file
    free = inputs.strategy in (None, FILE) and inputs.traffic is None
    if file is None and free and settings.bucket_file is not None:
        file = BucketFile(settings.bucket_file, "blocks", "environment VLLM_BUCKETING_FROM_FILE")
    if file is not None:
        return _from_file(inputs, file)
    chosen = _strategies(inputs.strategy, settings, inputs.traffic)
    if inputs.traffic is None and TRAFFIC in [name for name, _ in chosen.values()]:
        raise InputError("the traffic strategy plans for recorded requests: name them with --traffic FILE")
    return _from_rules(inputs, chosen)


def _strategies(strategy: str | None, settings: Settings, traffic: Traffic | None) -> dict[Phase, tuple[str, str]]:
    """The name of each phase's strategy, and its origin."""
    if strategy == FILE:
        raise InputError("the file strategy reads its buckets from a file: name it with --from-file FILE")
    if strategy is not None:
        return dict.fromkeys(PHASES, (strategy, "flag"))
    if traffic is not None:
        return dict.fromkeys(PHASES, (TRAFFIC, "flag --traffic"))
    common = (DEFAULT_STRATEGY, "default")
    if settings.strategy is not None:
        common = (settings.strategy, f"environment {settings.strategy_variable}")
    return {
        phase: (settings.phase_strategies[phase], f"environment VLLM_{phase.upper()}_BUCKETING_STRATEGY")
        if phase in settings.phase_strategies
        else common
        for phase in PHASES
    }


def _from_rules(inputs: PlanInputs, chosen: Mapping[Phase, tuple[str, str]]) -> Proposal:
    limits = inputs.limits
    rules: dict[Phase, tuple[str, Strategy]] = {phase: (name, create(name)) for phase, (name, _) in chosen.items()}
    found = ranges.resolve(limits, inputs.flags, rules, inputs.settings, inputs.max_seq_len_to_capture)
    proposal = Proposal({phase: name for phase, (name, _) in chosen.items()}, found)
    origins = {origin for _, origin in chosen.values()}
    if len(origins) == 1:
        proposal.origins["strategy"] = origins.pop()
    else:
        proposal.origins["strategy"] = ", ".join(f"{phase}: {origin}" for phase, (_, origin) in chosen.items())
    for phase, (name, rule) in rules.items():
        values: Axes = axes(limits, phase, rule, found.values)
        if name == TRAFFIC:
            proposal.free[phase] = free_candidates(limits, phase, values, proposal.completions)
        else:
            buckets, proposal.notes[phase] = grid(limits, values)
            require_some(phase, buckets, proposal.notes[phase])
            proposal.buckets[phase] = complete(limits, phase, buckets, proposal.completions)
    return proposal


def _from_file(inputs: PlanInputs, file: BucketFile) -> Proposal:
    limits = inputs.limits
    if inputs.strategy not in (None, FILE):
        raise InputError(f"--strategy {inputs.strategy} and --from-file were both given; give one of them")
    given = [bounds.source for bounds in inputs.flags.values() if bounds is not None]
    if given:
        raise InputError(f"{file.path} already lists the buckets; leave out {', '.join(given)}")
    buckets, notes = bucket_file.load(file.path, limits, file.unit)
    proposal = Proposal(dict.fromkeys(PHASES, FILE), ranges.Ranges())
    proposal.origins["strategy"] = file.origin
    proposal.ranges.warnings += [
        f"{number.variable} has no effect: the buckets come from {Path(file.path).name}"
        for number in inputs.settings.bucket_numbers.values()
    ]
    for phase in PHASES:
        proposal.notes[phase] = [note for note in notes if note.phase in (phase, None)]
        known: list[Bucket] = [bucket for bucket in buckets if bucket.phase == phase]
        proposal.buckets[phase] = complete(limits, phase, known, proposal.completions)
    return proposal


def _warnings(settings: Settings, proposal: Proposal) -> list[Note]:
    texts = [*settings.warnings, *proposal.ranges.warnings]
    origin = proposal.origins["strategy"]
    if settings.bucket_file is not None and origin != "environment VLLM_BUCKETING_FROM_FILE":
        texts.append(f"VLLM_BUCKETING_FROM_FILE has no effect: the strategy is {proposal.name} ({origin})")
    variables = [f"VLLM_{phase.upper()}_BUCKETING_STRATEGY" for phase in settings.phase_strategies]
    if settings.strategy_variable is not None:
        variables.append(settings.strategy_variable)
    texts += [
        f"{variable} has no effect: the strategy is {proposal.name} ({origin})"
        for variable in variables
        if variable not in origin
    ]
    return [Note("warning", text) for text in texts]


def choose(
    limits: Limits, proposal: Proposal, traffic: Traffic | None, budget: Budget, costs: GraphCosts | None
) -> tuple[list[Bucket], list[Note], dict[str, Fact]]:
    """Return the plan's buckets, notes on chosen and dropped buckets, and facts for the provenance.

    Without a budget, the plan is the rule's proposal; traffic then only shows its padding.
    """
    notes = [*(note for phase in PHASES for note in proposal.notes.get(phase, [])), *proposal.completions]
    if not proposal.free and not budget.given():
        whole = [bucket for phase in PHASES for bucket in proposal.buckets[phase]]
        facts = {} if traffic is None else _judged(BucketSet(limits, tuple(whole)), traffic)
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
                f"{traffic.cached_requests} prompts have a cached prefix and recompute it, since "
                "prompt buckets have context 0; give --prompt-context MIN,STEP,MAX to reuse it"
            )
            notes.append(Note("warning", text, "prompt"))
    for phase, choice in chosen.items():
        notes += _notes(phase, proposal, choice, budget, traffic is not None)
    whole = [*by_rule, *(bucket for choice in chosen.values() for bucket in choice.buckets)]
    facts = {} if traffic is None else _judged(BucketSet(limits, tuple(whole)), traffic)
    return whole, notes, facts | {f"{phase}_gap": round(choice.gap, 6) for phase, choice in chosen.items()}


def open_problems(limits: Limits, proposal: Proposal, traffic: Traffic | None) -> dict[Phase, PhaseProblem]:
    """Return the choice that remains for each phase, with the demand of `traffic` (None: every admissible request
    once).
    """
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
    return PlanGrouping(BucketSet(prompt.limits, tuple(Bucket("prompt", *member) for member in prompt.members)))


def _notes(phase: Phase, proposal: Proposal, choice: Chosen, budget: Budget, recorded: bool) -> list[Note]:
    notes = []
    if phase not in proposal.free:
        dropped = len(proposal.buckets[phase]) - len(choice.buckets)
        if dropped:
            demand = "the recorded traffic" if recorded else "every admissible request, all equally likely"
            text = f"the {len(choice.buckets)} kept have the least padding on {demand} ({', '.join(budget.given())})"
            notes.append(Note("dropped", text, phase, dropped))
    return notes


def _judged(plan: BucketSet, traffic: Traffic) -> dict[str, Fact]:
    """The padding of a finished plan on the traffic, as facts."""
    found = replay(plan, traffic)
    facts = traffic.facts()
    for one in found.phases:
        facts[f"{one.phase}_steps"] = one.steps
        if one.padding is not None and one.ragged_padding is not None:
            facts[f"{one.phase}_padding"] = round(one.padding, 6)
            facts[f"{one.phase}_ragged_padding"] = round(one.ragged_padding, 6)
    return facts
