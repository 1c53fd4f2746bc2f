"""The contract of a server model, for vLLM on Gaudi."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.servers import arguments
from llmc.buckets.servers.base import (
    Accepted,
    Demand,
    Export,
    Family,
    Finder,
    GraphCost,
    Lists,
    Setup,
    Shape,
)
from llmc.buckets.servers.settings import Setting
from llmc.buckets.servers.vllm_gaudi import bucket_file, demands, filters, log, proposal, ranges
from llmc.buckets.servers.vllm_gaudi.filters import DECODE, PROMPT
from llmc.buckets.servers.vllm_gaudi.lookup import Lookup
from llmc.buckets.servers.vllm_gaudi.view import SETTINGS, View
from llmc.buckets.traffic.chunked_schedule import chunked_steps
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import StepTime
from llmc.errors import InputError

AXES = ("batch", "query", "context blocks")

LIMITS = {**arguments.LIMITS, "--block-size": "block_size"}


class VllmGaudi:
    """Two families: prompt buckets of (batch, query, context blocks of one sequence) and decode buckets of (batch, 1,
    blocks of the whole batch). The modules beside this one name the file that each rule was read from."""

    name: ClassVar[str] = "vllm-gaudi"
    title: ClassVar[str] = "vLLM on Intel Gaudi"
    source: ClassVar[str] = (
        "vllm-gaudi 091bbad (August 2026), features.py and docs at 024a962, pull requests 1362, 1552, 1700 and 1745: "
        "vllm_gaudi/extension/bucketing, vllm_gaudi/v1/worker/hpu_model_runner.py"
    )
    families: ClassVar[tuple[Family, ...]] = (
        Family(PROMPT, AXES, "new tokens and context blocks"),
        Family(DECODE, AXES, "rows and KV cache blocks"),
    )
    settings: ClassVar[tuple[Setting, ...]] = SETTINGS
    limit_flags: ClassVar[Mapping[str, str]] = LIMITS
    cost: ClassVar[GraphCost] = GraphCost(
        14.0,
        (25 << 30) // 300,
        "126 decode buckets take 29 minutes with Llama-4-Maverick-17B-128E (vllm-gaudi#1160), and more than 300 "
        "buckets 20 to 30 GiB with a 27B model (vllm-gaudi#1736)",
    )

    def limits(self, given: Mapping[str, int]) -> Limits:
        """max_num_seqs 256, max_num_batched_tokens 2048 and blocks of 128, as `vllm serve` on Gaudi has them."""
        given = {"max_num_seqs": 256, "block_size": 128, **given}
        given.setdefault("max_num_batched_tokens", max(2048, given["max_num_seqs"]))
        return Limits(**given)

    def default(self, setup: Setup) -> Lists:
        """The buckets of VLLM_BUCKETING_STRATEGY. Raises InputError for ranges that end the server."""
        view = View.of(setup)
        prompts = filters.prompts(view, ranges.prompt(view))
        decodes = filters.decodes(view, ranges.decode(view))
        _check_left(PROMPT, prompts)
        _check_left(DECODE, decodes)
        return _lists(prompts, filters.expanded(view, decodes))

    def accept(self, setup: Setup, lists: Lists) -> Accepted:
        """What a file with `lists` leaves: filtered and clipped, with the buckets that drafts add where they are not
        there yet.

        Raises InputError where a family has none left, which ends the server.
        """
        view = View.of(setup)
        prompts, dropped = filters.from_file(view, PROMPT, lists[PROMPT])
        decodes, more = filters.from_file(view, DECODE, lists[DECODE])
        _check_left(PROMPT, prompts)
        _check_left(DECODE, decodes)
        prepared = filters.with_drafts(view, decodes)
        added = tuple((DECODE, shape) for shape in sorted(prepared - decodes))
        return Accepted(_lists(prompts, prepared), (*dropped, *more), added)

    def demands(self, setup: Setup, requests: Iterable[TrafficRequest], step_time: StepTime) -> Iterator[Demand]:
        """See `demands.count`."""
        return demands.count(View.of(setup), chunked_steps(requests, setup.limits, step_time))

    def finder(self, setup: Setup, family: str, shapes: Sequence[Shape]) -> Finder:
        """The first covering bucket in sort order; a miss adds one. See `Lookup`."""
        return Lookup(View.of(setup), family, shapes)

    def work(self, setup: Setup, family: str, shape: Shape) -> int:
        """See `proposal.work`."""
        return proposal.work(family, shape)

    def graphs(self, setup: Setup, lists: Lists) -> int:
        """One for each bucket. The sampler's, the defragmenter's and those of images are the same for every list."""
        return sum(map(len, lists.values()))

    def propose(self, setup: Setup, demands: Mapping[str, Mapping[Shape, Demand]], most: Mapping[str, int]) -> Lists:
        """See `proposal.propose`."""
        return proposal.propose(View.of(setup), demands, most)

    def from_plan(self, setup: Setup, plan: Plan) -> Lists:
        """Contexts in blocks, a decode's of all its sequences, each with room for the token of the step.

        Prompt batches above VLLM_PROMPT_BS_BUCKET_MAX, which the server never runs, are left out. Raises InputError for
        a plan of other limits.
        """
        view = View.of(setup)
        theirs, ours = plan.limits.to_dict(), setup.limits.to_dict()
        for name in LIMITS.values():
            if theirs[name] != ours[name]:
                raise InputError(f"the plan has {name} {theirs[name]} and the server {ours[name]}; plan for the server")
        prompts = {
            (bucket.batch, bucket.query, min(-(-bucket.context // view.block), view.most_context))
            for bucket in plan.prompt
            if bucket.batch <= view.prefill
        }
        decodes = set()
        for bucket in plan.decode:
            blocks = bucket.batch * min(bucket.context // view.block + 1, view.blocks_each)
            decodes.add((bucket.batch, 1, min(blocks + 1, view.pool) if view.contiguous else blocks))
        return _lists(prompts, decodes)

    def export(self, setup: Setup, lists: Lists) -> Export:
        """buckets.txt, the variables that it needs, and the flags of the limits it holds for.

        The prefill batch is a variable of its own: without it larger prompt buckets are never used. The number of
        blocks is pinned where it is given: compiled recipes are not reused for another one (vllm-fork#1054).
        """
        view = View.of(setup)
        listed = {PROMPT: lists[PROMPT], DECODE: tuple(sorted(filters.seeds(view, lists[DECODE])))}
        batch = max([view.prefill, *(shape[0] for shape in lists[PROMPT])])
        environment = {
            "VLLM_BUCKETING_FROM_FILE": bucket_file.NAME,
            "VLLM_PROMPT_BS_BUCKET_MAX": str(batch),
            "VLLM_CONTIGUOUS_PA": str(view.contiguous).lower(),
        }
        flags = arguments.limit_flags(setup.limits, LIMITS)
        if setup.own["num_hpu_blocks"] is not None:
            flags.append(f"--num-gpu-blocks-override {view.pool}")
        if not setup.own["prefix_caching"]:
            flags.append("--no-enable-prefix-caching")
        if view.drafts:
            flags.append(arguments.json_flag("--speculative-config", {"num_speculative_tokens": view.drafts}))
        return Export(environment, tuple(flags), {bucket_file.NAME: bucket_file.write(listed)})

    def read(self, given: Export, setup: Setup) -> Lists:
        """What the file of VLLM_BUCKETING_FROM_FILE lists, before the server's filters, with the buckets that drafts
        add; without a file its own buckets.

        Raises InputError for lines that the server would skip, a file without buckets of a family, and flags that
        state other limits than `setup`.
        """
        arguments.agree(arguments.flags(given), setup.limits, LIMITS)
        file = bucket_file.of(given.environment, given.files)
        if file is None:
            return self.default(setup)
        lists = bucket_file.parse(file[1], file[0])
        for family, query in ((PROMPT, "a query above 1"), (DECODE, "query 1")):
            if not lists[family]:
                raise InputError(f"{file[0]}: lists no {family} bucket, one with {query}: the server ends; add one")
        view = View.of(setup)
        kept, dropped = filters.from_file(view, DECODE, lists[DECODE])
        return _lists(lists[PROMPT], filters.with_drafts(view, kept).union(drop.shape for drop in dropped))

    def read_log(self, lines: Iterable[str]) -> Lists | None:
        """The lists behind "Generated … buckets", else the lines of the warm-up. See `log.parse`."""
        return log.parse(lines)


def _lists(prompts: Iterable[Shape], decodes: Iterable[Shape]) -> Lists:
    return {PROMPT: tuple(sorted(prompts)), DECODE: tuple(sorted(decodes))}


def _check_left(family: str, shapes: Iterable[Shape]) -> None:
    if not shapes:
        words = f"no {family} bucket is left by the server's filters, which ends it"
        raise InputError(f"vllm-gaudi: {words}; raise the limits or give other buckets")
