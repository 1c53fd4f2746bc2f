"""A server of two families for tests: tokens of steps, next above; and decode batches, compiled where they miss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.traffic.chunked_schedule import chunked_steps
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import StepTime
from llmc.integrations import arguments, line
from llmc.integrations.base import (
    Accepted,
    BucketRules,
    Export,
    Finder,
    GraphCost,
    GraphDemand,
    GraphFamily,
    Lists,
    NextAbove,
    Setup,
    Shape,
)
from llmc.integrations.settings import Setting


class Fake(BucketRules):
    name = "fake"
    title = "A fake server"
    source = "this test"
    families = (
        GraphFamily("tokens", ("tokens",), "tokens"), GraphFamily("decode", ("batch",), "requests"),
    )  # fmt: skip
    settings = (Setting("gap", int, 0, "A gap.", "--gap", "FAKE_GAP", least=0),)
    limit_flags = arguments.BLOCK_LIMITS
    cost = GraphCost(2.0, None, "this test")

    def limits(self, given: Mapping[str, int]) -> Limits:
        return Limits(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 8, **given})

    def default(self, setup: Setup) -> Lists:
        limits = setup.limits
        return {
            "tokens": line.shapes(line.doubling(1, limits.max_num_batched_tokens)),
            "decode": line.shapes(line.doubling(1, limits.max_num_seqs)),
        }

    def accept(self, setup: Setup, lists: Lists) -> Accepted:
        return Accepted(lists)

    def demands(self, setup: Setup, requests: Iterable[TrafficRequest], step_time: StepTime) -> Iterator[GraphDemand]:
        for one in chunked_steps(requests, setup.limits, step_time):
            yield GraphDemand("tokens", (one.tokens,), one.steps, one.tokens * one.steps)
            if len(one.cached):
                yield GraphDemand("decode", (len(one.cached),), one.steps, len(one.cached) * one.steps)

    def finder(self, setup: Setup, family: str, shapes: Sequence[Shape]) -> Finder:
        return NextAbove(shapes, "eager" if family == "tokens" else "compile")

    def graphs(self, setup: Setup, lists: Lists) -> int:
        return len(lists["tokens"]) * len(lists["decode"])

    def propose(
        self, setup: Setup, demands: Mapping[str, Mapping[Shape, GraphDemand]], most: Mapping[str, int]
    ) -> Lists:
        tops = {"tokens": setup.limits.max_num_batched_tokens, "decode": setup.limits.max_num_seqs}
        return {
            name: line.choose(demands.get(name, {}), range(1, top + 1), [top], most[name]) for name, top in tops.items()
        }

    def from_plan(self, setup: Setup, plan: Plan) -> Lists:
        return {
            "tokens": line.shapes(bucket.tokens for bucket in plan.prompt),
            "decode": line.shapes(bucket.batch for bucket in plan.decode),
        }

    def export(self, setup: Setup, lists: Lists) -> Export:
        lines = {name: " ".join(str(n) for (n,) in shapes) for name, shapes in lists.items()}
        flags = tuple(arguments.limit_flags(setup.limits, self.limit_flags))
        return Export(
            {"FAKE_GAP": str(setup.own["gap"]), "FAKE_LISTS": "lists.txt"}, (*flags, "--json {\"a\": 1}"),
            {"lists.txt": "".join(f"{name} {text}\n" for name, text in lines.items())},
        )  # fmt: skip

    def read(self, given: Export, setup: Setup) -> Lists:
        found = dict(self.default(setup))
        for text in given.files.values():
            for each in text.splitlines():
                if each.startswith("#"):
                    continue
                name, *numbers = each.split()
                found[name] = line.shapes(map(int, numbers))
        return found

    def read_log(self, lines: Iterable[str]) -> Lists | None:
        found = {}
        for text in lines:
            if text.startswith("Prepared "):
                name, *numbers = text.split()[1:]
                found[name] = line.shapes(map(int, numbers))
        return found or None
