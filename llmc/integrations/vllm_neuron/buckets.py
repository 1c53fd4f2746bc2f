"""vLLM on AWS Trainium (vLLM Neuron): tokens of a prefill segment, requests of a decode step, and its context."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
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
from llmc.integrations.settings import SPECULATIVE, Setting
from llmc.integrations.steps import pieces, separate_steps

TOKENS, REQUESTS, CONTEXT = "tokens", "requests", "context"
CONFIG, NEURON = "--additional-config", "neuron_config"
NAMES = {
    TOKENS: "num_batched_tokens_buckets",
    REQUESTS: "num_seqs_buckets",
    CONTEXT: "decode_context_length_buckets",
}
SEGMENT = "kv_segment_size_buckets"
SEGMENTS = (512, 1024, 2048, 4096)
"""Segment sizes in tokens that the segmented attention kernel supports."""
SINGLE_SHOT = 16384
"""Largest max_model_len whose prompts may run whole."""
TILE = 128
"""Divisor of contexts for the attention kernel, and the least of the server's own token buckets."""

_LOGGED = {
    family: re.compile(rf"\b{name}(?: from (?:neuron_)?config| to match {SEGMENT})?(?:: |=)\[([\d, ]+)\]")
    for family, name in NAMES.items()
}
_LENGTH = re.compile(r"\bmax_(?:seq|model)_len['\"]?[=:] ?(\d{1,9})\b")


class VllmNeuron(BucketRules):
    """The rules of vllm_neuron/utils/bucket_utils.py, vllm_neuron/vllm/core/scheduler.py and the worker's warm-up, also
    in the documentation of Neuron SDK 2.33.

    One prompt at a time is prefilled, in segments of max_num_batched_tokens, while decodes wait; each segment is padded
    to a bucket of tokens. A decode step is padded to a bucket of requests. Where context buckets are given, it reads
    the cache up to the next one instead of max_model_len. With segments there is one bucket of tokens.
    """

    name = "vllm-neuron"
    title = "vLLM on AWS Trainium (vLLM Neuron)"
    source = (
        "Neuron SDK 2.33 (June 2026): vllm_neuron/utils/bucket_utils.py, vllm_neuron/vllm/core/scheduler.py, "
        "vllm_neuron/vllm/worker; docs/design/vllm/neuron-scheduler.md, decode-context-length-bucketing.md"
    )
    families = (
        GraphFamily(TOKENS, ("tokens",), "tokens"),
        GraphFamily(REQUESTS, ("requests",), "tokens, one a request"),
        GraphFamily(CONTEXT, ("context",), "tokens of the longest context", counted=False),
    )
    settings = (
        *SPECULATIVE,
        Setting("decode_context_parallel_size", int, 1, "Ranks that share a sequence's cache.",
                "--decode-context-parallel-size", least=1),
    )  # fmt: skip
    limit_flags = arguments.BLOCK_LIMITS
    cost = GraphCost(None, None, "not published by graph; see Neuron's compilation cache and the log's warm-up lines")

    def limits(self, given: Mapping[str, int]) -> Limits:
        """Return max_num_seqs 256 and max_num_batched_tokens 2048 (vLLM's least defaults), at most max_model_len.

        A prefill must be all of max_model_len, up to 16,384, or a segment that the kernel supports.
        """
        given = {"max_num_seqs": 256, **given}
        length = given["max_model_len"]
        tokens = min(given.get("max_num_batched_tokens", 2048), length)
        if tokens < length and tokens not in SEGMENTS:
            whole = f", or {length}, for whole prompts" if length <= SINGLE_SHOT else ""
            raise InputError(
                f"vllm-neuron: max_num_batched_tokens {tokens} is not a segment size of Neuron's prefill; "
                f"set one of {', '.join(map(str, SEGMENTS))}{whole}"
            )
        if tokens == length > SINGLE_SHOT:
            raise InputError(
                f"vllm-neuron: prompts of max_model_len {length} cannot be prefilled whole, only up to {SINGLE_SHOT}; "
                f"set max_num_batched_tokens to one of {', '.join(map(str, SEGMENTS))}"
            )
        return Limits(**{**given, "max_num_batched_tokens": tokens})

    def default(self, setup: Setup) -> Lists:
        """Return tokens doubled from 128 to max_num_batched_tokens, or one segment; requests from 1 to max_num_seqs.

        The context is max_model_len.
        """
        limits = setup.limits
        tokens = [limits.max_num_batched_tokens]
        if not _segmented(limits):
            tokens = line.doubling(TILE, limits.max_num_batched_tokens)
        kept, _ = self._aligned(setup, tokens)
        return {
            TOKENS: line.shapes(kept),
            REQUESTS: line.shapes(line.doubling(1, limits.max_num_seqs)),
            CONTEXT: line.shapes([limits.max_model_len]),
        }

    def accept(self, setup: Setup, lists: Lists) -> Accepted:
        """Require that each list ends with its limit, and add max_model_len to contexts.

        With a cache that several ranks share, tokens that are not a multiple of their blocks are dropped.
        """
        limits = setup.limits
        tokens, requests, contexts = (line.values(lists[name]) for name in (TOKENS, REQUESTS, CONTEXT))
        for family, values, limit in (
            (TOKENS, tokens, "max_num_batched_tokens"), (REQUESTS, requests, "max_num_seqs"),
        ):  # fmt: skip
            most = getattr(limits, limit)
            if not values or values[-1] != most:
                last = f"ends with {values[-1]}" if values else "is empty"
                raise InputError(f"vllm-neuron: {NAMES[family]} {last}; it must end with {limit}, {most}")
        if _segmented(limits) and tokens != [limits.max_num_batched_tokens]:
            raise InputError(
                f"vllm-neuron: {NAMES[TOKENS]} {tokens}, with prefill in segments (max_num_batched_tokens {tokens[-1]} "
                f"is below max_model_len {limits.max_model_len}), must be [{tokens[-1]}], since the kernel has one size"
            )
        length = limits.max_model_len
        for value in contexts:
            if value > length or (value != length and value % TILE):
                raise InputError(
                    f"vllm-neuron: {NAMES[CONTEXT]} {value} must be a multiple of {TILE} below max_model_len {length}"
                )
        kept, dropped = self._aligned(setup, tokens)
        full = {TOKENS: line.shapes(kept), REQUESTS: lists[REQUESTS], CONTEXT: line.shapes([*contexts, length])}
        return Accepted.of(lists, full, dropped)

    def demands(self, setup: Setup, requests: Iterable[TrafficRequest], step_time: StepTime) -> Iterator[GraphDemand]:
        """Yield a prefill segment's tokens; a decode step's requests, and its longest context plus its new tokens."""
        query = 1 + setup.number("num_speculative_tokens")
        length = setup.limits.max_model_len
        for step in separate_steps(requests, setup.limits, step_time):
            if isinstance(step, int):
                yield GraphDemand(TOKENS, (step,), 1, step)
                continue
            yield GraphDemand(REQUESTS, (step.batch,), step.steps, step.batch * step.steps)
            first = step.longest + query
            for piece in pieces(first, step.steps, length, TILE):
                real = min(piece.total(first, 1), piece.context * piece.steps)
                yield GraphDemand(CONTEXT, (piece.context,), piece.steps, real)

    def graphs(self, setup: Setup, lists: Lists) -> int:
        """Return one per bucket of tokens, and one per pair of requests and context.

        With drafts, each pair has a second graph for decodes without them. The drafter's own graphs are not counted.
        """
        pairs = len(lists[REQUESTS]) * len(lists[CONTEXT])
        return len(lists[TOKENS]) + pairs * (2 if setup.number("num_speculative_tokens") else 1)

    def propose(self, setup: Setup, demands: Demands, most: Mapping[str, int]) -> Lists:
        """Propose tokens and contexts in multiples of 128, any number of requests; with segments the one bucket of
        tokens.
        """
        limits, stride = setup.limits, self._stride(setup)
        tokens, seqs, length = limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_model_len
        step = math.lcm(TILE, stride)
        prompt = [] if _segmented(limits) else range(step, tokens, step)
        return {
            TOKENS: line.choose(demands.get(TOKENS, {}), [*prompt, tokens], [tokens], most[TOKENS]),
            REQUESTS: line.choose(demands.get(REQUESTS, {}), range(1, seqs + 1), [seqs], most[REQUESTS]),
            CONTEXT: line.choose(
                demands.get(CONTEXT, {}), [*range(TILE, length, TILE), length], [length], most[CONTEXT]
            ),
        }

    def from_plan(self, setup: Setup, plan: Plan) -> Lists:
        """Return the queries of prompt buckets, the batches and the contexts of decode buckets, with the limits."""
        limits = setup.limits
        tokens, seqs, length = limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_model_len
        queries = set() if _segmented(limits) else {bucket.query for bucket in plan.prompt if bucket.query < tokens}
        contexts = {-(-(bucket.context + 1) // TILE) * TILE for bucket in plan.decode}
        return {
            TOKENS: line.shapes([*self._aligned(setup, sorted({*queries, tokens}))[0]]),
            REQUESTS: line.shapes([*(bucket.batch for bucket in plan.decode if bucket.batch < seqs), seqs]),
            CONTEXT: line.shapes([*(context for context in contexts if context < length), length]),
        }

    def export(self, setup: Setup, lists: Lists) -> Export:
        """Export --additional-config, and the flags as a file for --config.

        Without segments, prefix caching is off, which the server requires.
        """
        values = {family: line.values(lists[family]) for family in NAMES}
        config: dict[str, object] = {NAMES[TOKENS]: values[TOKENS], NAMES[REQUESTS]: values[REQUESTS]}
        if contexts := [value for value in values[CONTEXT] if value < setup.limits.max_model_len]:
            config[NAMES[CONTEXT]] = contexts
        words = arguments.limit_flags(setup.limits, arguments.BLOCK_LIMITS)
        if not _segmented(setup.limits):
            words.append("--no-enable-prefix-caching")
        if (ranks := setup.number("decode_context_parallel_size")) > 1:
            words.append(f"--decode-context-parallel-size {ranks}")
        return arguments.vllm_export(
            [*words, arguments.json_flag(CONFIG, {NEURON: config}), *arguments.drafts_flag(setup)]
        )

    def read(self, given: Export, setup: Setup) -> Lists:
        """Return the three lists of neuron_config; kv_segment_size_buckets must agree with the limits."""
        found = arguments.stated(given, CONFIG, (NEURON,))
        arguments.agree(found, setup.limits)
        segment = arguments.numbers(found, CONFIG, (NEURON, SEGMENT))
        tokens = setup.limits.max_num_batched_tokens
        if segment is not None and (segment != [tokens] or tokens not in SEGMENTS):
            raise InputError(
                f"{CONFIG}.{NEURON}.{SEGMENT} {segment} must be max_num_batched_tokens {tokens} alone, and one of "
                f"{', '.join(map(str, SEGMENTS))}"
            )
        lists = dict(self.default(setup))
        for family, name in NAMES.items():
            values = arguments.numbers(found, CONFIG, (NEURON, name))
            if values is None:
                continue
            arguments.ascending(f"{CONFIG}.{NEURON}.{name}", values)
            if family == CONTEXT and values[-1] >= setup.limits.max_model_len:
                raise InputError(
                    f"{CONFIG}.{NEURON}.{name} {values[-1]} must be below max_model_len {setup.limits.max_model_len}, "
                    "which the server adds itself"
                )
            lists[family] = line.shapes(values)
        if segment is not None and lists[TOKENS] != line.shapes(segment):
            if arguments.numbers(found, CONFIG, (NEURON, NAMES[TOKENS])) is not None:
                raise InputError(f"{CONFIG}.{NEURON}.{NAMES[TOKENS]} must equal {SEGMENT}, {segment}")
            lists[TOKENS] = line.shapes(segment)
        return self.accept(setup, lists).lists

    def read_log(self, lines: Iterable[str]) -> Lists | None:
        """Return the lists that the scheduler and the runner print, each as "… buckets: [128, 256]".

        The last context is vLLM's max_seq_len; where vLLM's line is missing, `accept` adds it.
        """
        found: dict[str, tuple[Shape, ...]] = {}
        length: list[int] = []
        for text in lines:
            for family, pattern in _LOGGED.items():
                if match := pattern.search(text):
                    found[family] = line.written_numbers(match[1], NAMES[family])
            if match := _LENGTH.search(text):
                length = [int(match[1])]
        if not {TOKENS, REQUESTS} <= found.keys():
            return None
        return {**found, CONTEXT: line.shapes([*line.values(found.get(CONTEXT, ())), *length])}

    def _stride(self, setup: Setup) -> int:
        """The divisor of token buckets, where ranks share a sequence's cache block by block."""
        ranks = setup.number("decode_context_parallel_size")
        return ranks * setup.limits.block_size if ranks > 1 else 1

    def _aligned(self, setup: Setup, tokens: Sequence[int]) -> tuple[list[int], tuple[Dropped, ...]]:
        """`tokens` that the ranks can share, and the others. Raises InputError where the last is among these."""
        stride = self._stride(setup)
        if tokens[-1] % stride:
            raise InputError(
                f"vllm-neuron: max_num_batched_tokens {tokens[-1]} is not a multiple of {stride}, "
                "decode_context_parallel_size times block_size; change one of the three"
            )
        reason = f"not a multiple of {stride}, decode_context_parallel_size times block_size"
        dropped = tuple(Dropped(TOKENS, (value,), reason) for value in tokens if value % stride)
        return [value for value in tokens if value % stride == 0], dropped


def _segmented(limits: Limits) -> bool:
    return limits.max_num_batched_tokens < limits.max_model_len
