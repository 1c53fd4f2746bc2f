"""vLLM on Qualcomm Cloud AI: compute context lengths of prefill chunks and of decode steps."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.traffic.chunked_schedule import chunked_steps
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import StepTime
from llmc.errors import InputError
from llmc.integrations import arguments, line
from llmc.integrations.base import (
    Accepted,
    BucketRules,
    Demands,
    Dropped,
    Export,
    GraphCost,
    GraphDemand,
    GraphFamily,
    Lists,
    Setup,
    Shape,
)
from llmc.integrations.settings import Setting, within
from llmc.integrations.steps import pieces

PREFILL, DECODE = "prefill", "decode"
CONFIG, OVERRIDE = "--additional-config", "override_qaic_config"
NAMES = {PREFILL: "comp_ctx_lengths_prefill", DECODE: "comp_ctx_lengths_decode"}
LEAST = 1024
"""The least compute context length in tokens; shorter ones are raised to it, longer ones run best as its multiples."""
APART = 32
"""Distance of prefill lengths below a multiple of 1024, since the two lists must be disjoint."""

_LOGGED = {
    PREFILL: re.compile(r"Prefill context lengths: \[([\d, ]+)\]"),
    DECODE: re.compile(r"Decode context lengths: \[([\d, ]+)\]"),
}


class Qualcomm(BucketRules):
    """The rules of QEfficient/utils/check_ccl_specializations.py and of vllm_qaic's model runner (_run_prefill,
    _run_decode) and configuration (_clean_config).

    A program has one prefill shape, of one sequence and prefill_seq_len tokens, and one decode shape, of max_num_seqs
    sequences. Each is specialised for the cache tokens that its attention reads, its compute context lengths. Without
    them there is one, max_model_len. A chunk, or a step, takes the least above its largest position. Lists that
    QEfficient generates by itself (ccl_enabled without lists) are not modelled.
    """

    name = "qualcomm"
    title = "vLLM on Qualcomm Cloud AI (QEfficient)"
    source = (
        "efficient-transformers main (December 2025): QEfficient/utils/check_ccl_specializations.py; vllm_qaic (2026): "
        "model runner and utilities"
    )
    families = (
        GraphFamily(PREFILL, ("context",), "tokens of context"),
        GraphFamily(DECODE, ("context",), "tokens of context"),
    )
    settings = (
        Setting("prefill_seq_len", int, 128, "Tokens of a prefill chunk.", "--long-prefill-token-threshold", least=1),
    )
    cost = GraphCost(None, None, "not published; all specialisations are in one program")

    def limits(self, given: Mapping[str, int]) -> Limits:
        """Return limits where a block is a whole sequence."""
        return arguments.vllm_limits({**given, "block_size": given["max_model_len"]})

    def default(self, setup: Setup) -> Lists:
        """Return one length, max_model_len, for both."""
        return dict.fromkeys(NAMES, line.shapes([setup.limits.max_model_len]))

    def accept(self, setup: Setup, lists: Lists) -> Accepted:
        """Raise lengths below 1024 to 1024, and add max_model_len to each list.

        A prefill length that is also in the decode list is lowered until no list has it. With chunks of one token both
        lists become their union.
        """
        length = setup.limits.max_model_len
        if lists == self.default(setup):
            return Accepted(lists)
        given = {family: line.values(lists[family]) for family in NAMES}
        for family, name in NAMES.items():
            if not given[family]:
                raise InputError(f"qualcomm: {name} is empty; end it with max_model_len {length}")
            if given[family][-1] > length:
                raise InputError(
                    f"qualcomm: {name} {given[family][-1]} is above max_model_len {length}, which makes the server "
                    "ignore both lists; lower it"
                )
        chunk = setup.number("prefill_seq_len")
        if chunk > 1 and length - 1 in given[DECODE]:
            raise InputError(
                f"qualcomm: {NAMES[DECODE]} {length - 1} leaves no prefill length for a prompt of as many tokens, "
                "since the lists must be disjoint; remove it"
            )
        built = _built(given, length, chunk)
        if _built(built, length, chunk) != built:
            raise InputError(
                f"qualcomm: {NAMES[PREFILL]} {given[PREFILL]} and {NAMES[DECODE]} {given[DECODE]} push prefill lengths "
                f"below {LEAST}, the least; leave the shortest out of one of them"
            )
        full = {family: line.shapes(values) for family, values in built.items()}
        reason = f"below {LEAST}, above what max_model_len {length} leaves, or in the other list: changed"
        changed = [(family, shape) for family in NAMES for shape in lists[family] if shape not in full[family]]
        return Accepted.of(lists, full, (Dropped(*one, reason) for one in changed))

    def demands(self, setup: Setup, requests: Iterable[TrafficRequest], step_time: StepTime) -> Iterator[GraphDemand]:
        """Yield the context of each chunk including its own tokens, and the longest of each decode step plus its new
        token.

        A step runs both, one after the other. No prefix is cached.
        """
        length = setup.limits.max_model_len
        whole = (request._replace(cached=0) for request in requests)
        for steps in chunked_steps(whole, setup.limits, step_time, chunk_most=setup.number("prefill_seq_len")):
            for chunk in steps.chunks:
                context = chunk.past + chunk.new
                yield GraphDemand(PREFILL, (context,), 1, context)
            if not len(steps.cached):
                continue
            batch, total = len(steps.cached), int(steps.cached.sum())
            for piece in pieces(int(steps.cached.max()) + 1, steps.steps, length):
                yield GraphDemand(DECODE, (piece.context,), piece.steps, piece.total(total + batch, batch))

    def work(self, setup: Setup, family: str, shape: Shape) -> int:
        """Return the tokens that attention reads: of one sequence in prefill, of max_num_seqs in decode."""
        return shape[0] * (setup.limits.max_num_seqs if family == DECODE else 1)

    def propose(self, setup: Setup, demands: Demands, most: Mapping[str, int]) -> Lists:
        """Propose multiples of 1024 for decode, and the longest of either.

        Prefill lengths are 32 less (1024, or one less where decode has it).
        """
        length = setup.limits.max_model_len
        if most[PREFILL] == most[DECODE] == 1:
            return self.default(setup)
        values = [*range(LEAST, length, LEAST), length]
        if setup.number("prefill_seq_len") == 1:
            both = line.choose(self._weighed(setup, demands), values, [length], min(most.values()))
            return dict.fromkeys(NAMES, both)
        decode = line.choose(demands.get(DECODE, {}), values, [length], most[DECODE])
        least = LEAST - 1 if (LEAST,) in decode else LEAST
        prefill = [value for value in (least, *(value - APART for value in values[1:-1])) if value < length]
        chosen = line.choose(demands.get(PREFILL, {}), [*prefill, length - 1], [length - 1], most[PREFILL])
        return self.accept(setup, {PREFILL: chosen, DECODE: decode}).lists

    def _weighed(self, setup: Setup, demands: Demands) -> dict[Shape, GraphDemand]:
        """All steps as one family's, each weighted by its rows."""
        steps: Counter[Shape] = Counter()
        for family, shapes in demands.items():
            rows = setup.limits.max_num_seqs if family == DECODE else 1
            steps.update({shape: demand.steps * rows for shape, demand in shapes.items()})
        return {shape: GraphDemand(DECODE, shape, count, 0) for shape, count in steps.items()}

    def from_plan(self, setup: Setup, plan: Plan) -> Lists:
        """Return the lengths at the end of prompt buckets, and the contexts of decode buckets plus the new token."""
        length = setup.limits.max_model_len
        prefill = [min(bucket.context + bucket.query, length) for bucket in plan.prompt]
        decode = [min(bucket.context + 1, length) for bucket in plan.decode]
        return self.accept(setup, {PREFILL: line.shapes(prefill), DECODE: line.shapes(decode)}).lists

    def export(self, setup: Setup, lists: Lists) -> Export:
        """Export --additional-config, its override_qaic_config as a file, and the flags as a file for --config."""
        values = {name: line.values(lists[family]) for family, name in NAMES.items()}
        config = {OVERRIDE: {} if lists == self.default(setup) else values}
        words = [
            *arguments.limit_flags(setup.limits), f"--long-prefill-token-threshold {setup.number('prefill_seq_len')}",
            "--no-enable-prefix-caching", arguments.json_flag(CONFIG, config),
        ]  # fmt: skip
        return arguments.vllm_export(words, files={"config.json": json.dumps(config[OVERRIDE], indent=2) + "\n"})

    def read(self, given: Export, setup: Setup) -> Lists:
        """Return the two lists of override_qaic_config, each a JSON list or numbers with commas.

        With only one list, the other is max_model_len.
        """
        found = arguments.stated(given, CONFIG, tuple(NAMES.values()), OVERRIDE)
        arguments.agree(found, setup.limits)
        lengths = {family: _stated(found, name) for family, name in NAMES.items()}
        default = self.default(setup)
        if all(values is None for values in lengths.values()):
            return default
        lists = {family: default[family] if values is None else values for family, values in lengths.items()}
        return self.accept(setup, lists).lists

    def read_log(self, lines: Iterable[str]) -> Lists | None:
        """Return the lists that QEfficient prints under "CCL Configuration:"."""
        found = line.logged(lines, _LOGGED, {family: family for family in NAMES})
        return found if found.keys() == NAMES.keys() else None


def _built(given: Mapping[str, Collection[int]], length: int, chunk: int) -> dict[str, set[int]]:
    """The lengths that QEfficient compiles, for lists without a number above `length` and prefill chunks of `chunk`
    tokens.
    """
    built = {family: {min(max(value, LEAST), length) for value in values} for family, values in given.items()}
    built[DECODE].add(length)
    if max(built[PREFILL]) < length - 1:
        built[PREFILL].add(length)
    if chunk == 1:
        return dict.fromkeys(NAMES, built[PREFILL] | built[DECODE])
    return {PREFILL: _apart(built[PREFILL], built[DECODE]), DECODE: built[DECODE]}


def _apart(prefill: Iterable[int], decode: set[int]) -> set[int]:
    """`prefill` with each number, in ascending order, lowered until neither list has it."""
    found: set[int] = set()
    for value in sorted(prefill):
        lowered = value
        while lowered in decode or lowered in found:
            lowered -= 1
        found.add(lowered)
    return found


def _stated(found: Mapping[str, str], name: str) -> tuple[Shape, ...] | None:
    value = within(CONFIG, found[CONFIG], (OVERRIDE, name)) if CONFIG in found else None
    spelling = f"{CONFIG}.{OVERRIDE}.{name}"
    if isinstance(value, str):
        return line.written_numbers(value, spelling)
    return None if value is None else line.numbers(value, spelling)
