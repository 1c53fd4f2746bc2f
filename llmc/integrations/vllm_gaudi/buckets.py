"""vLLM on Gaudi: prompt and decode buckets, their look-up, and the buckets that misses add.

Look-up and fallback are those of vllm_gaudi/extension/bucketing/common.py (find_prompt_bucket, find_decode_bucket,
generate_fallback_bucket, calc_fallback_value), August 2026, at commit 091bbad.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.traffic.chunked_schedule import chunked_steps
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import StepTime
from llmc.errors import InputError
from llmc.integrations import arguments
from llmc.integrations.base import (
    Accepted,
    BucketRules,
    Demands,
    Export,
    Finder,
    GraphCost,
    GraphDemand,
    GraphFamily,
    Lists,
    Pick,
    Setup,
    Shape,
)
from llmc.integrations.vllm_gaudi import config, demands, logs, proposal, sizes
from llmc.integrations.vllm_gaudi.config import DECODE, PROMPT, SETTINGS, GaudiView

AXES = ("batch", "query", "context blocks")


class VllmGaudi(BucketRules):
    """Two families: prompt buckets of (batch, query, context blocks of one sequence) and decode buckets of (batch, 1,
    blocks of the whole batch).

    The modules in this folder name the source file of each rule. The graphs of the sampler, the defragmenter and images
    are the same for every list and not counted.
    """

    name = "vllm-gaudi"
    title = "vLLM on Intel Gaudi"
    source = (
        "vllm-gaudi 091bbad (August 2026), features.py and docs at 024a962, pull requests 1362, 1552, 1700 and 1745: "
        "vllm_gaudi/extension/bucketing, vllm_gaudi/v1/worker/hpu_model_runner.py"
    )
    families = (
        GraphFamily(PROMPT, AXES, "new tokens and context blocks"),
        GraphFamily(DECODE, AXES, "rows and KV cache blocks"),
    )
    settings = SETTINGS
    limit_flags = arguments.BLOCK_LIMITS
    cost = GraphCost(
        14.0,
        (25 << 30) // 300,
        "126 decode buckets take 29 minutes with Llama-4-Maverick-17B-128E (vllm-gaudi#1160), and more than 300 "
        "buckets 20 to 30 GiB with a 27B model (vllm-gaudi#1736)",
    )

    def limits(self, given: Mapping[str, int]) -> Limits:
        """Return blocks of 128, as in `vllm serve` on Gaudi."""
        return arguments.vllm_limits(given, block_size=128)

    def default(self, setup: Setup) -> Lists:
        """Return the buckets of VLLM_BUCKETING_STRATEGY. Raises InputError for ranges with which the server exits."""
        view = GaudiView.of(setup)
        prompts = sizes.prompt_buckets(view, sizes.prompt_ranges(view))
        decodes = sizes.decode_buckets(view, sizes.decode_ranges(view))
        _check_left(PROMPT, prompts)
        _check_left(DECODE, decodes)
        return _lists(prompts, sizes.expanded(view, decodes))

    def accept(self, setup: Setup, lists: Lists) -> Accepted:
        """Filter and clip the buckets of a file with `lists`, and add the missing buckets for drafts.

        Raises InputError where a family has none left, with which the server exits.
        """
        view = GaudiView.of(setup)
        prompts, dropped = sizes.from_file(view, PROMPT, lists[PROMPT])
        decodes, more = sizes.from_file(view, DECODE, lists[DECODE])
        _check_left(PROMPT, prompts)
        _check_left(DECODE, decodes)
        prepared = sizes.with_drafts(view, decodes)
        added = tuple((DECODE, shape) for shape in sorted(prepared - decodes))
        return Accepted(_lists(prompts, prepared), (*dropped, *more), added)

    def demands(self, setup: Setup, requests: Iterable[TrafficRequest], step_time: StepTime) -> Iterator[GraphDemand]:
        return demands.count(GaudiView.of(setup), chunked_steps(requests, setup.limits, step_time))

    def uniform(self, setup: Setup, own: Lists) -> Iterator[GraphDemand]:
        """Yield decode steps of each number of sequences, and prompts of each length, with contexts evenly spaced."""
        return demands.uniform(GaudiView.of(setup), max(shape[2] for shape in own[DECODE]))

    def finder(self, setup: Setup, family: str, shapes: Sequence[Shape]) -> Finder:
        return Lookup(GaudiView.of(setup), family, shapes)

    def work(self, setup: Setup, family: str, shape: Shape) -> int:
        return proposal.work(family, shape)

    def propose(self, setup: Setup, demands: Demands, most: Mapping[str, int]) -> Lists:
        return proposal.propose(GaudiView.of(setup), demands, most)

    def from_plan(self, setup: Setup, plan: Plan) -> Lists:
        """Return contexts in blocks, a decode's of all its sequences, each with room for the new token.

        Prompt batches above VLLM_PROMPT_BS_BUCKET_MAX, which the server never runs, are dropped. Raises InputError for
        a plan of other limits.
        """
        view = GaudiView.of(setup)
        theirs, ours = plan.limits.to_dict(), setup.limits.to_dict()
        for name in self.limit_flags.values():
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
        """Export buckets.txt, its variables, and the flags of the limits it holds for.

        The prefill batch is a separate variable: without it larger prompt buckets are never used. The number of blocks
        is pinned where it is given, since compiled recipes are not reused for another one (vllm-fork#1054).
        """
        view = GaudiView.of(setup)
        listed = {PROMPT: lists[PROMPT], DECODE: tuple(sorted(sizes.seeds(view, lists[DECODE])))}
        batch = max([view.prefill, *(shape[0] for shape in lists[PROMPT])])
        environment = {
            "VLLM_BUCKETING_FROM_FILE": config.BUCKET_FILE,
            "VLLM_PROMPT_BS_BUCKET_MAX": str(batch),
            "VLLM_CONTIGUOUS_PA": str(view.contiguous).lower(),
        }
        flags = arguments.limit_flags(setup.limits, self.limit_flags)
        if setup.own["num_hpu_blocks"] is not None:
            flags.append(f"--num-gpu-blocks-override {view.pool}")
        if not setup.own["prefix_caching"]:
            flags.append("--no-enable-prefix-caching")
        flags += arguments.drafts_flag(setup)
        return Export(environment, tuple(flags), {config.BUCKET_FILE: config.write_buckets(listed)})

    def read(self, given: Export, setup: Setup) -> Lists:
        """Return the buckets in the file of VLLM_BUCKETING_FROM_FILE, before the server's filters, with those for
        drafts.

        Without a file, the server's own buckets. Raises InputError for lines that the server would skip, a file without
        buckets of a family, and flags that disagree with `setup`.
        """
        arguments.agree(arguments.flags(given), setup.limits, self.limit_flags)
        file = config.bucket_file(given.environment, given.files)
        if file is None:
            return self.default(setup)
        lists = config.read_buckets(file[1], file[0])
        for family, query in ((PROMPT, "a query above 1"), (DECODE, "query 1")):
            if not lists[family]:
                raise InputError(f"{file[0]}: lists no {family} bucket, one with {query}, so the server exits; add one")
        view = GaudiView.of(setup)
        kept, dropped = sizes.from_file(view, DECODE, lists[DECODE])
        return _lists(lists[PROMPT], sizes.with_drafts(view, kept).union(drop.shape for drop in dropped))

    def read_log(self, lines: Iterable[str]) -> Lists | None:
        return logs.start_lists(lines)


def _lists(prompts: Iterable[Shape], decodes: Iterable[Shape]) -> Lists:
    return {PROMPT: tuple(sorted(prompts)), DECODE: tuple(sorted(decodes))}


def _check_left(family: str, shapes: Iterable[Shape]) -> None:
    if not shapes:
        words = f"the server's filters leave no {family} bucket, so it exits"
        raise InputError(f"vllm-gaudi: {words}; raise the limits or give other buckets")


BATCH_STEP, QUERY_STEP, BLOCKS_STEP = 2, 32, 32


def fallback_value(number: int, step: int) -> int:
    """Return `number` rounded up to a multiple of ceil(∛number) · step; 0 and 1 stay."""
    if number <= 1:
        return number
    unit = math.ceil(math.pow(number, 1 / 3)) * step
    return -(-number // unit) * unit


Rows = list[tuple[int, list[tuple[int, list[int]]]]]
"""Buckets by batch, query and context, each ascending."""


def _rows(shapes: set[Shape]) -> Rows:
    return [
        (batch, [(query, [c for _, _, c in same]) for query, same in groupby(row, lambda shape: shape[1])])
        for batch, row in groupby(sorted(shapes), lambda shape: shape[0])
    ]


class Lookup:
    """The buckets of one family while the server runs.

    The server takes the first bucket in sort order that covers all three numbers, not the cheapest. Where none does, a
    bucket is added and compiled during serving, each number by `fallback_value`. The batch is at most max_num_seqs, the
    query at most max_num_batched_tokens, and a prompt's context at most the need of max_model_len. A decode's context
    is at most the largest one prepared at start; a decode that needs more is looked up with that many. A found bucket
    can therefore be smaller than the step, which then runs unpadded and is compiled separately.
    """

    def __init__(self, view: GaudiView, family: str, shapes: Sequence[Shape]) -> None:
        self._view = view
        self._prompt = family == PROMPT
        self._shapes = set(shapes)
        self._rows = _rows(self._shapes)
        self._most = max((context for _, _, context in shapes), default=0)
        self._known: dict[Shape, Pick] = {}

    def find(self, shape: Shape) -> Pick:
        found = self._known.get(shape)
        if found is None:
            found = self._find(shape)
            if found.miss is None:
                self._known[shape] = found
        return found

    def _find(self, shape: Shape) -> Pick:
        batch, query, context = shape
        cut = not self._prompt and 0 < self._most < context
        if cut:
            context = self._most
        requested = (batch, query, context)
        bucket = self._first(requested)
        if bucket is not None:
            return Pick(bucket, "compile" if cut else None)
        bucket = self.fallback(requested)
        if bucket not in self._shapes:
            self._shapes.add(bucket)
            self._rows = _rows(self._shapes)
            self._known.clear()
        return Pick(bucket, "compile")

    def _first(self, requested: Shape) -> Shape | None:
        batch, query, context = requested
        for rows, queries in self._rows[bisect_left(self._rows, (batch,)) :]:
            for tokens, contexts in queries[bisect_left(queries, (query,)) :]:
                index = bisect_left(contexts, context)
                if index < len(contexts):
                    return rows, tokens, contexts[index]
        return None

    def fallback(self, shape: Shape) -> Shape:
        """Return the bucket that is added for an uncovered step of `shape`."""
        view = self._view
        batch, query, context = shape
        slice_size = view.number("sdpa_slice")
        if view.own["sdpa_slices"] and query >= view.number("sdpa_threshold"):
            query = -(-query // slice_size) * slice_size
        else:
            query = min(fallback_value(query, max(QUERY_STEP, view.number("mamba_chunk_size"))), view.tokens)
        most = view.most_context if self._prompt else self._most
        blocks = fallback_value(context, BLOCKS_STEP)
        if most > 0:
            blocks = min(blocks, most)
        return min(fallback_value(batch, BATCH_STEP), view.seqs), query, blocks
