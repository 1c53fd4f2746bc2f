"""vLLM on TPU (tpu-inference): token paddings of a step, and request paddings of its attention."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.traffic.chunked_schedule import MixedSteps, chunked_steps
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import StepTime
from llmc.errors import InputError
from llmc.integrations import arguments, line
from llmc.integrations.base import (
    Accepted,
    BucketRules,
    Demands,
    Export,
    GraphCost,
    GraphDemand,
    GraphFamily,
    Lists,
    Setup,
    Shape,
)
from llmc.integrations.settings import SPECULATIVE, Setting, from_flags, release

TOKENS, REQUESTS = "tokens", "requests"
CONFIG, SIZES = "--additional-config", "compilation_sizes"
LEAST, GAP = "MIN_TOKEN_BUCKET", "VLLM_TPU_BUCKET_PADDING_GAP"
PROCESSES = "TPU_MULTIPROCESS_DP"
BUCKETIZED, CUSTOM = "ATTN_BUCKETIZED_NUM_REQS", "ATTN_CUSTOM_NUM_REQS_BUCKETS"
MIN_NUM_SEQS = 8
"""Requests of the least padding that tpu-inference generates."""
NEWEST = "0.32"
ROWS = 8
"""Rows of a TPU tile (openxla.org/xla/tiled_layout): fewer tokens than a multiple of it cost as much."""

VARIABLES = {"min_token_bucket": LEAST, "padding_gap": GAP, "bucketized_requests": BUCKETIZED}
"""Settings that affect only its own lists. They are read with the lists, and are not part of a list's setup."""

_TOKENS = re.compile(r"Prepared token paddings: \[([\d, ]+)\]")
_REQUESTS = re.compile(r"Prepared attn request paddings: \[([\d, ]+)\]")
_BACKBONE = re.compile(r"Precompile .*backbone --> \{'num_tokens': (\d{1,9})\b")


class TpuInference(BucketRules):
    """The rules of tpu_inference/runner/utils.py (build_token_paddings, get_token_paddings, get_req_paddings,
    get_attn_req_paddings, get_padded_token_len), tpu_runner.py (_init_inputs, _prepare_inputs), compilation_manager.py.

    A step's tokens on the fullest data-parallel rank are padded to the next size, times the number of ranks; its
    requests are padded likewise, for attention only. `vllm serve` runs each rank in a separate process with its own
    padding, unless TPU_MULTIPROCESS_DP=0. The server adds given sizes to its generated ones and removes none. A custom
    list therefore makes it generate as few as possible (`_generated_with`), and adds the others by compilation_sizes.
    From 0.30 on it also adds the token budget, rounded up to a multiple of MIN_TOKEN_BUCKET, and drops larger generated
    sizes.
    """

    name = "tpu-inference"
    title = "vLLM on TPU (tpu-inference)"
    source = "tpu-inference 0.24 to 0.32: tpu_inference/runner/utils.py, tpu_runner.py, compilation_manager.py"
    families = (
        GraphFamily(TOKENS, ("tokens",), "tokens"),
        GraphFamily(REQUESTS, ("requests",), "requests of attention", counted=False),
    )
    settings = (
        Setting("release", str, NEWEST, "tpu-inference's release; --server tpu-inference@0.29 is the same."),
        Setting("multiprocess_dp", bool, True, "Whether each data-parallel rank is a process with its own padding.",
                variable="TPU_MULTIPROCESS_DP"),
        Setting("data_parallel_size", int, 1, "Data-parallel ranks, attention's included.", "--data-parallel-size",
                least=1),
        Setting("kv_cache_dtype", str, "auto", "Type of the KV cache; auto is bfloat16.", "--kv-cache-dtype"),
        Setting("min_token_bucket", int, 16, f"Least of its own token paddings, a power of two ({LEAST}).", least=1),
        Setting("padding_gap", int, 0, f"Step between its own token paddings; 0 doubles them ({GAP}).", least=0),
        Setting("bucketized_requests", bool, False,
                f"Whether attention has powers of two of requests of its own ({BUCKETIZED})."),
        Setting("token_multiple", int, ROWS,
                "Divisor of proposed token paddings; 16 for MoE models with an odd number of experts a token, "
                "whose grouped matmul asserts it.", least=1),
        *SPECULATIVE,
    )  # fmt: skip
    cost = GraphCost(
        None, None, 'not published by graph; see the log\'s "Compilation of … finished", and set NUM_PRECOMPILE_WORKERS'
    )

    def limits(self, given: Mapping[str, int]) -> Limits:
        """Return the limits; max_num_seqs and max_num_batched_tokens apply to one rank."""
        return arguments.vllm_limits(given)

    def default(self, setup: Setup) -> Lists:
        """Return powers of two from min_token_bucket (with a gap: up to it, then by it) until a step fits.

        Attention is for max_num_seqs requests; with bucketized_requests also for powers of two from 8.
        """
        tokens = self._generated(setup, setup.number("min_token_bucket"), setup.number("padding_gap"))
        most = setup.limits.max_num_seqs
        requests = [most]
        if setup.own["bucketized_requests"] and most >= MIN_NUM_SEQS:
            requests = line.doubling(MIN_NUM_SEQS, most)
        return {TOKENS: line.shapes(tokens), REQUESTS: line.shapes(requests)}

    def accept(self, setup: Setup, lists: Lists) -> Accepted:
        """Add a size that covers every step, and attention for max_num_seqs requests, where missing."""
        ranks, most = _ranks(setup), setup.limits.max_num_seqs
        cover = next((size for (size,) in lists[TOKENS] if self._one(setup, size)), self._cover(setup))
        generated = self._generated_with(setup, cover)
        for (size,) in lists[TOKENS]:
            if size % ranks and size not in generated:
                raise InputError(
                    f"tpu-inference: {SIZES} {size} is not a multiple of {ranks}, the data-parallel ranks, so it "
                    f"cannot be shared among them; use {-(-size // ranks) * ranks}"
                )
        for (count,) in lists[REQUESTS]:
            if count > most:
                raise InputError(
                    f"tpu-inference: {CUSTOM} {count} is above max_num_seqs {most}, which the server appends behind "
                    "it, so that its look-up fails; remove it"
                )
        needed = {TOKENS: line.shapes(generated), REQUESTS: ((most,),)}
        return Accepted.of(
            lists, {family: tuple(sorted({*lists[family], *shapes})) for family, shapes in needed.items()}
        )

    def demands(self, setup: Setup, requests: Iterable[TrafficRequest], step_time: StepTime) -> Iterator[GraphDemand]:
        """Yield all tokens of a step, and its requests.

        Of several ranks the fullest counts: decodes are spread evenly over them, then each prompt's part goes to the
        rank with the fewest tokens. Of ranks in separate processes the first counts, with every Nth request.
        """
        ranks, drafts, own = _ranks(setup), setup.number("num_speculative_tokens"), setup.limits
        if setup.own["multiprocess_dp"]:
            requests = islice(requests, 0, None, setup.number("data_parallel_size"))
        limits = Limits(own.max_model_len, own.max_num_seqs * ranks, own.max_num_batched_tokens * ranks, own.block_size)
        for steps in chunked_steps(requests, limits, step_time, chunk_most=own.max_num_batched_tokens):
            tokens, count = _fullest(steps, ranks, 1 + drafts)
            tokens = min(tokens, own.max_num_batched_tokens) * ranks
            real = min(steps.tokens + drafts * len(steps.cached), tokens)
            yield GraphDemand(TOKENS, (tokens,), steps.steps, real * steps.steps)
            running = len(steps.cached) + len(steps.chunks)
            yield GraphDemand(REQUESTS, (min(count, own.max_num_seqs),), steps.steps, running * steps.steps)

    def work(self, setup: Setup, family: str, shape: Shape) -> int:
        """Return the padded tokens of all ranks, or their padded requests."""
        return shape[0] * (_ranks(setup) if family == REQUESTS else 1)

    def graphs(self, setup: Setup, lists: Lists) -> int:
        """Return the model's graphs: each size of tokens with each of requests.

        Small graphs for logits, sampling and selection are not counted; their number follows the same sizes.
        """
        return len(lists[TOKENS]) * len(lists[REQUESTS])

    def propose(self, setup: Setup, demands: Demands, most: Mapping[str, int]) -> Lists:
        """Propose multiples of token_multiple and of the ranks' KV packing, and multiples of 8 requests."""
        seqs, cover = setup.limits.max_num_seqs, self._cover(setup)
        step = math.lcm(setup.number("token_multiple"), _ranks(setup) * _packing(setup))
        tokens = [*range(step, cover, step), cover]
        requests = [*range(MIN_NUM_SEQS, seqs, MIN_NUM_SEQS), seqs]
        unused = [size for size in self._generated_with(setup, cover) if size != cover]
        if most[TOKENS] <= len(unused):
            raise InputError(f"tpu-inference: it generates at least {len(unused) + 1} sizes; allow as many")
        chosen = line.choose(demands.get(TOKENS, {}), tokens, [cover], most[TOKENS] - len(unused))
        return {
            TOKENS: line.shapes([*line.values(chosen), *unused]),
            REQUESTS: line.choose(demands.get(REQUESTS, {}), requests, [seqs], most[REQUESTS]),
        }

    def from_plan(self, setup: Setup, plan: Plan) -> Lists:
        """Return the tokens of prompt buckets and decode steps, shared among the ranks; attention for max_num_seqs."""
        ranks, cover = _ranks(setup), self._cover(setup)
        query = 1 + setup.number("num_speculative_tokens")
        sizes = {bucket.tokens for bucket in plan.prompt} | {bucket.batch * query for bucket in plan.decode}
        tokens = [-(-size // ranks) * ranks for size in sizes]
        return {
            TOKENS: line.shapes([*(size for size in tokens if size < cover), *self._generated_with(setup, cover)]),
            REQUESTS: line.shapes([setup.limits.max_num_seqs]),
        }

    def export(self, setup: Setup, lists: Lists) -> Export:
        """Export environment variables, --additional-config, and the flags as a file for --config."""
        seqs = setup.limits.max_num_seqs
        tokens, requests = line.values(lists[TOKENS]), line.values(lists[REQUESTS])
        cover = next(size for size in tokens if self._one(setup, size))
        built = self._generated_with(setup, cover)
        least, gap = _power(cover), cover - _power(cover) // 2
        environment = {
            LEAST: str(least),
            GAP: str(gap if cover < least else 0),
            BUCKETIZED: str(int(requests != [seqs])),
        }
        if requests != [seqs]:
            environment[CUSTOM] = ",".join(map(str, requests))
        if setup.number("data_parallel_size") > 1:
            environment[PROCESSES] = str(int(bool(setup.own["multiprocess_dp"])))
        words = arguments.limit_flags(setup.limits)
        if (ranks := setup.number("data_parallel_size")) > 1:
            words.append(f"--data-parallel-size {ranks}")
        if setup.own["kv_cache_dtype"] != "auto":
            words.append(f"--kv-cache-dtype {setup.own['kv_cache_dtype']}")
        words.append(arguments.json_flag(CONFIG, {SIZES: [size for size in tokens if size not in built]}))
        note = f"{LEAST} is large on purpose: the server adds {SIZES} to the sizes that it generates from {LEAST} on"
        return replace(arguments.vllm_export([*words, *arguments.drafts_flag(setup)], environment), notes=(note,))

    def read(self, given: Export, setup: Setup) -> Lists:
        """Return the sizes that the variables make the server generate, and compilation_sizes."""
        found = arguments.stated(given, CONFIG, (SIZES,))
        arguments.agree(found, setup.limits)
        variables = [replace(one, variable=VARIABLES[one.name]) for one in self.settings if one.name in VARIABLES]
        own = {**setup.own, **from_flags(variables, {}, given.environment)}
        built = Setup(setup.limits, own)
        default = self.default(built)
        sizes = arguments.numbers(found, CONFIG, (SIZES,), least=0) or []
        lists = {TOKENS: line.shapes([*line.values(default[TOKENS]), *sizes]), REQUESTS: default[REQUESTS]}
        custom = given.environment.get(CUSTOM, "")
        if own["bucketized_requests"] and custom:
            try:
                counts = [int(word) for word in custom.split(",")]
            except ValueError:
                raise InputError(f"{CUSTOM} {custom!r} must be whole numbers with commas, as in 8,16,32") from None
            arguments.ascending(CUSTOM, counts)
            if counts[0] < 1:
                raise InputError(f"{CUSTOM} {counts[0]} must be at least 1")
            lists[REQUESTS] = line.shapes(counts)
        return self.accept(built, lists).lists

    def read_log(self, lines: Iterable[str]) -> Lists | None:
        """Return the sizes that the log names during compilation; without these lines, the generated ones."""
        generated: tuple[Shape, ...] = ()
        requests: tuple[Shape, ...] = ()
        compiled = set()
        for text in lines:
            if match := _BACKBONE.search(text):
                compiled.add(int(match[1]))
            elif not generated and (match := _TOKENS.search(text)):
                generated = line.written_numbers(match[1], "token paddings")
            elif match := _REQUESTS.search(text):
                requests = line.written_numbers(match[1], "attn request paddings")
        if not (compiled or generated) or not requests:
            return None
        return {TOKENS: line.shapes(compiled) or generated, REQUESTS: requests}

    def _cover(self, setup: Setup) -> int:
        """The least size that fits every step and that the server can generate without others."""
        ranks = _ranks(setup)
        return max(setup.limits.max_num_batched_tokens * ranks, _power(ranks * _packing(setup)))

    def _one(self, setup: Setup, size: int) -> bool:
        """Whether the server can be made to generate `size` with nothing below it.

        A power of two p is the only size where MIN_TOKEN_BUCKET is p and every step fits. With a gap below
        MIN_TOKEN_BUCKET p, generation starts at p / 2 and adds the gap, once where p / 2 is below the most tokens.
        """
        cover = self._cover(setup)
        full = setup.limits.max_num_batched_tokens * _ranks(setup)
        return size >= cover and (size == _power(size) or _power(size) // 2 < full)

    def _generated_with(self, setup: Setup, cover: int) -> tuple[int, ...]:
        """The generated sizes where the server is made to generate `cover`: from 0.30 on also a power of two."""
        return (cover,) if _release(setup) < (0, 30) else tuple(sorted({cover, _power(cover)}))

    def _generated(self, setup: Setup, least: int, gap: int) -> list[int]:
        """The server's sizes for MIN_TOKEN_BUCKET and the gap: build_token_paddings, 0.29 get_token_paddings."""
        if least & (least - 1):
            raise InputError(f"{LEAST} {least} must be a power of two; use {_power(least)}")
        ranks = _ranks(setup)
        full = setup.limits.max_num_batched_tokens * ranks
        least = size = max(least, _power(ranks * _packing(setup)))
        found = []
        while size < full if gap == 0 else size <= gap:
            found.append(size)
            size *= 2
        if gap == 0:
            found.append(size)
        else:
            size //= 2
            while size < full:
                size += gap
                found.append(size)
        if _release(setup) >= (0, 30):
            budget = -(-full // least) * least
            return sorted({*(one for one in found if one <= budget), budget})
        if not found:
            raise InputError(f"{LEAST} {least} with {GAP} {gap} leaves no padding; set {GAP}=0")
        return found


def _release(setup: Setup) -> tuple[int, ...]:
    return release("tpu-inference", str(setup.own["release"]))


def _ranks(setup: Setup) -> int:
    """Data-parallel ranks that pad together."""
    return 1 if setup.own["multiprocess_dp"] else setup.number("data_parallel_size")


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _packing(setup: Setup) -> int:
    """Values of the KV cache in 32 bits; "auto" is the model's 16 bits."""
    kind = str(setup.own["kv_cache_dtype"])
    return 4 if kind.startswith(("fp8", "int8", "float8")) else 1 if kind in ("float32", "float") else 2


def _fullest(steps: MixedSteps, ranks: int, query: int) -> tuple[int, int]:
    """Tokens and requests of the fullest of `ranks`."""
    running = len(steps.cached)
    counts = [running // ranks + (rank < running % ranks) for rank in range(ranks)]
    tokens = [count * query for count in counts]
    for chunk in sorted(steps.chunks, reverse=True):
        rank = min(range(ranks), key=lambda index: (tokens[index], counts[index]))
        tokens[rank] += chunk.new
        counts[rank] += 1
    return max(tokens), max(counts)
