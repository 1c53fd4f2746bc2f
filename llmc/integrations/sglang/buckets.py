"""SGLang on CUDA and ROCm: CUDA graphs by the requests of a decode step, and by the tokens of a prefill."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.traffic.events import DecodeRun, TrafficRequest
from llmc.buckets.traffic.schedule import schedule
from llmc.buckets.traffic.step_time import StepTime
from llmc.errors import InputError
from llmc.integrations import arguments, line
from llmc.integrations.base import (
    Accepted,
    Demands,
    Dropped,
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
from llmc.integrations.settings import Setting, within
from llmc.integrations.steps import DECODE, DecodeBatches

PREFILL = "prefill"
FLAGS = {DECODE: ("--cuda-graph-bs-decode", "--cuda-graph-bs"), PREFILL: ("--cuda-graph-bs-prefill",)}
"""Flags of each list; the second is the name in releases without graphs of prompts."""
CONFIG = "--cuda-graph-config"
PROMPTS_OFF = "--disable-prefill-cuda-graph"
OFF = {
    "--disable-cuda-graph": "SGLang runs without graphs; leave it out to plan them",
    "--disable-decode-cuda-graph": "SGLang decodes without graphs; leave it out to plan them",
    PROMPTS_OFF: "state it as --cuda-graph-backend-prefill disabled",
}
"""Flags that disable graphs."""
FACTOR = 2
"""A prefill runs eagerly where its graph has more than this many times its tokens."""

LIMITS = {
    "--context-length": "max_model_len",
    "--max-running-requests": "max_num_seqs",
    "--chunked-prefill-size": "max_num_batched_tokens",
}

_LOGGED = {
    DECODE: re.compile(
        r"Capture cuda graph bs \[([\d,\s]+)\]|Capture target (?:decode|verify) CUDA .*?bs=\[([\d,\s]+)\]"
    ),
    PREFILL: re.compile(r"Capture target prefill CUDA .*?num_tokens=\[([\d,\s]+)\]()"),
}

TIERS = ((20, 8, 8), (35, 48, 160), (60, 32, 160), (160, 256, 512))
"""(GiB, batch, batch): below this GPU memory, the largest captured batch with tp_size below 4, and from 4 on."""


class Sglang(DecodeBatches):
    """Prefills come before decode steps and are not mixed with them.

    Data-parallel attention, the DeepEP cap and the prompt backend "full" are not modelled.
    """

    name = "sglang"
    title = "SGLang on CUDA and ROCm"
    source = (
        "SGLang 0.5.23: arg_groups/cuda_graph_hook.py, arg_groups/memory_hook.py, "
        "model_executor/runner/base_cuda_graph_runner.py, decode_cuda_graph_runner.py, prefill_cuda_graph_runner.py"
    )
    families = (*DecodeBatches.families, GraphFamily(PREFILL, ("tokens",), "tokens"))
    settings = (
        Setting("gpu_memory_gib", int, 80, "Memory of one GPU, which the largest batch depends on.", least=1),
        Setting("tp_size", int, 1, "Devices of one model.", "--tp-size", least=1,
                also=("--tp", "--tensor-parallel-size")),
        Setting(
            "cuda_graph_max_bs_decode", int, None, "The largest batch of SGLang's own list.",
            "--cuda-graph-max-bs-decode", least=1, also=("--cuda-graph-max-bs",),
        ),
        Setting(
            "cuda_graph_backend_prefill", str, None, "Whether prompts have graphs. Default: breakable, disabled "
            "with two-batch overlap; ROCm: disabled.", "--cuda-graph-backend-prefill",
            choices=("breakable", "disabled"),
        ),
        Setting(
            "cuda_graph_max_bs_prefill", int, None, "The most tokens of SGLang's own list; at most 8192 with MLA.",
            "--cuda-graph-max-bs-prefill", least=4,
        ),
        Setting(
            "speculative_num_draft_tokens", int, 0, "Draft tokens of a step; its own list is then another.",
            "--speculative-num-draft-tokens", least=0,
        ),
        Setting(
            "disable_cuda_graph_padding", bool, False, "A batch runs as a graph of its own size or eagerly.",
            "--disable-cuda-graph-padding",
        ),
        Setting(
            "enable_two_batch_overlap", bool, False, "Batches are even numbers.", "--enable-two-batch-overlap"
        ),
    )  # fmt: skip
    limit_flags = LIMITS
    cost = GraphCost(
        None, 2 << 20,
        "SGLang itself reserves 2 MiB for each request of the largest batch (arg_groups/memory_hook.py); seconds of a "
        'graph were not published: the log has them as "CUDA graph end. elapsed="',
    )  # fmt: skip

    def limits(self, given: Mapping[str, int]) -> Limits:
        """Return max_running_requests 2048, the least that SGLang derives from its memory, and chunked_prefill_size
        8192.

        The latter is the default on GPUs of 60 to 160 GiB.
        """
        return Limits(**{"max_num_seqs": 2048, "max_num_batched_tokens": 8192, "block_size": 1, **given})

    def default(self, setup: Setup) -> Lists:
        """Return SGLang's own lists.

        Decode: 1, 2, 4, 8, 12, then steps of 8 to 256, of 16 to 512 and of 32, up to and including a batch that the GPU
        memory determines; finer with drafts; every number without padding. Prompts: steps of 4 to 32, of 16 to 256, of
        32 to 512, of 64 to 1024, of 256 to 4096 and of 512, up to chunked_prefill_size.
        """
        most = self._largest(setup)
        if setup.own["disable_cuda_graph_padding"]:
            sizes = [*range(1, most + 1)]
        elif setup.number("speculative_num_draft_tokens"):
            sizes = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, most + 1, 16)]
        else:
            sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most + 1, 32)]
        decode = self._captured(setup, [*(size for size in sizes if size <= most), most])
        return {DECODE: decode, PREFILL: line.shapes(self._tokens(setup))}

    def accept(self, setup: Setup, lists: Lists) -> Accepted:
        """Drop batches above max_running_requests and add it instead; with two-batch overlap also drop odd ones.

        Token counts of prompts are unchanged, unless their graphs are disabled.
        """
        given = line.values(lists[DECODE])
        if not given:
            raise InputError("sglang: no batch of decode steps in the list; give one")
        kept = self._captured(setup, given)
        pool, prefill = self._pool(setup), lists[PREFILL] if self._prompts(setup) else ()
        if self._prompts(setup) and not prefill:
            raise InputError("sglang: no tokens of prompts in the list; give some, or disable their graphs")
        dropped = [
            Dropped(DECODE, (size,), f"above max_running_requests {pool}" if size > pool else "odd, with batch overlap")
            for size in given
            if (size,) not in kept
        ]
        dropped += [
            Dropped(PREFILL, shape, "graphs of prompts are disabled") for shape in lists[PREFILL] if not prefill
        ]
        return Accepted.of(lists, {DECODE: kept, PREFILL: prefill}, dropped)

    def demands(self, setup: Setup, requests: Iterable[TrafficRequest], step_time: StepTime) -> Iterator[GraphDemand]:
        """Yield decode steps, which wait while prompts run, and prefills.

        A prefill has the prompts admitted together, or a chunk of one that is longer than chunked_prefill_size. It is
        not filled up with a part of the next prompt.
        """
        most = setup.limits.max_num_batched_tokens
        for event in schedule(requests, setup.limits, step_time=step_time):
            if isinstance(event, DecodeRun):
                yield GraphDemand(DECODE, (event.batch,), event.steps, event.batch * event.steps)
            elif self._prompts(setup):
                whole, rest = divmod(sum(event.lengths) - sum(event.cached), most)
                if whole:
                    yield GraphDemand(PREFILL, (most,), whole, whole * most)
                if rest:
                    yield GraphDemand(PREFILL, (rest,), 1, rest)

    def finder(self, setup: Setup, family: str, shapes: Sequence[Shape]) -> Finder:
        """Decode: the next batch above, or only the same one without padding.

        Prompts: the next number of tokens above, if it is at most twice the step's. Others run eagerly.
        """
        if family == PREFILL:
            return WithinFactor(shapes, FACTOR)
        exact = setup.own["disable_cuda_graph_padding"]
        return line.Exact(shapes, self.miss) if exact else super().finder(setup, family, shapes)

    def propose(self, setup: Setup, demands: Demands, most: Mapping[str, int]) -> Lists:
        """Propose lists that reach as far as SGLang's own, so that no step loses its graph.

        Token counts of prompts are every number to 64, multiples of 4 to 256 and of 16 from there.
        """
        step = self._step(setup)
        own = self.default(setup)
        top = own[DECODE][-1][0]
        found, candidates = demands.get(DECODE, {}), range(step, top + 1, step)
        if setup.own["disable_cuda_graph_padding"]:
            decode = line.most_frequent(found, candidates, most[DECODE]) or ((top,),)
        else:
            decode = line.choose(found, candidates, [top], most[DECODE])
        if not own[PREFILL]:
            return {DECODE: decode, PREFILL: ()}
        largest = own[PREFILL][-1][0]
        tokens = sorted({*range(4, 65), *range(64, 257, 4), *range(256, largest + 1, 16), largest})
        chosen = _choose(demands.get(PREFILL, {}), [size for size in tokens if size <= largest], most[PREFILL], FACTOR)
        return {DECODE: decode, PREFILL: chosen}

    def from_plan(self, setup: Setup, plan: Plan) -> Lists:
        """Return the batches of decode buckets, and the token counts of prompt buckets within SGLang's own list."""
        tokens = self._tokens(setup)
        reached = [bucket.tokens for bucket in plan.prompt if tokens and bucket.tokens <= tokens[-1]]
        return {**super().from_plan(setup, plan), PREFILL: line.shapes(reached)}

    def export(self, setup: Setup, lists: Lists) -> Export:
        """Export --cuda-graph-config, one word in a shell, with the limits and settings that it holds for."""
        words = arguments.limit_flags(setup.limits, LIMITS)
        phases = {family: {"bs": line.values(sizes)} for family, sizes in lists.items() if sizes}
        words.append(arguments.json_flag(CONFIG, phases))
        for setting in self.settings:
            value = setup.own[setting.name]
            if setting.flag and not setting.name.startswith("cuda_graph_max_bs") and value != setting.default:
                words.append(setting.flag if value is True else f"{setting.flag} {value}")
        return Export({}, tuple(words))

    def read(self, given: Export, setup: Setup) -> Lists:
        """Return the lists of --cuda-graph-bs-decode (older name: --cuda-graph-bs) and --cuda-graph-bs-prefill.

        Also read is bs of a phase in --cuda-graph-config. Missing lists are SGLang's own.
        """
        flags = arguments.flags(given)
        arguments.agree(flags, setup.limits, LIMITS)
        for name, says in OFF.items():
            if name in flags and (name != PROMPTS_OFF or self._prompts(setup)):
                raise InputError(f"{name}: {says}")
        for family in FLAGS if CONFIG in flags else ():
            self._check_phase(setup, flags[CONFIG], family)
        return {family: self._stated(flags, family) or own for family, own in self.default(setup).items()}

    def read_log(self, lines: Iterable[str]) -> Lists | None:
        """Return the lists of the lines with which SGLang begins to capture graphs, the last of each.

        Empty where it captured none.
        """
        found: dict[str, tuple[Shape, ...]] = {DECODE: (), PREFILL: ()}
        for text in lines:
            for family, pattern in _LOGGED.items():
                if match := pattern.search(text):
                    found[family] = line.written_numbers(match[1] or match[2], FLAGS[family][0])
        return found if any(found.values()) else None

    def _stated(self, flags: Mapping[str, str], family: str) -> tuple[Shape, ...]:
        stated = {name: line.written_numbers(flags[name], name) for name in FLAGS[family] if name in flags}
        found = within(CONFIG, flags[CONFIG], (family, "bs")) if CONFIG in flags else None
        if found is not None:
            stated[CONFIG] = line.numbers(found, f"{CONFIG}.{family}.bs")
        if len(stated) > 1:
            raise InputError(f"{' and '.join(stated)} both state a list; keep one of them")
        return next(iter(stated.values()), ())

    def _check_phase(self, setup: Setup, text: str, family: str) -> None:
        """Raise InputError where --cuda-graph-config disagrees with the settings on a phase."""
        holds = {"backend": "full", "max_bs": setup.own[f"cuda_graph_max_bs_{family}"]}
        if family == PREFILL:
            holds["backend"] = "breakable" if self._prompts(setup) else "disabled"
        for key, value in holds.items():
            stated = within(CONFIG, text, (family, key))
            if stated is not None and stated != value:
                name = "max-bs" if key == "max_bs" else key
                raise InputError(f"{CONFIG}.{family}.{key} {stated}: state it as --cuda-graph-{name}-{family}")

    def _prompts(self, setup: Setup) -> bool:
        chosen = setup.own["cuda_graph_backend_prefill"]
        return not setup.own["enable_two_batch_overlap"] if chosen is None else chosen == "breakable"

    def _tokens(self, setup: Setup) -> list[int]:
        """SGLang's own token counts of prompts."""
        most = setup.own["cuda_graph_max_bs_prefill"]
        most = most if isinstance(most, int) else setup.limits.max_num_batched_tokens
        sizes = [
            *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64),
            *range(1280, 4097, 256), *range(4608, most + 1, 512),
        ]  # fmt: skip
        return [size for size in sizes if size <= most] if self._prompts(setup) else []

    def _largest(self, setup: Setup) -> int:
        """The largest batch of SGLang's own list: as stated, otherwise by the GPU memory and max_running_requests."""
        given = setup.own["cuda_graph_max_bs_decode"]
        if isinstance(given, int):
            return given
        wide, most = setup.number("tp_size") >= 4, 512
        for below, narrow_most, wide_most in reversed(TIERS):
            if setup.number("gpu_memory_gib") < below:
                most = wide_most if wide else narrow_most
        return min(most, setup.limits.max_num_seqs)

    def _step(self, setup: Setup) -> int:
        return 2 if setup.own["enable_two_batch_overlap"] else 1

    def _pool(self, setup: Setup) -> int:
        step = self._step(setup)
        return -(-setup.limits.max_num_seqs // step) * step

    def _captured(self, setup: Setup, sizes: Sequence[int]) -> tuple[Shape, ...]:
        step, pool = self._step(setup), self._pool(setup)
        added = [pool] if max(sizes) > pool else []
        kept = [size for size in [*sizes, *added] if size <= pool and size % step == 0]
        if not kept:
            raise InputError(f"sglang: no batch in the list is an even number up to {pool}; give one")
        return line.shapes(kept)


class WithinFactor:
    """Selects the least number at or above the requested one, unless it is above `factor` times that.

    In that case, and above the largest, a step runs eagerly in its own shape.
    """

    def __init__(self, shapes: Sequence[Shape], factor: int) -> None:
        self._values = [value for (value,) in shapes]
        self._factor = factor

    def find(self, shape: Shape) -> Pick:
        index = bisect_left(self._values, shape[0])
        if index < len(self._values) and self._values[index] <= self._factor * shape[0]:
            return Pick((self._values[index],))
        return Pick(shape, "eager")


def _choose(
    demands: Mapping[Shape, GraphDemand], candidates: Sequence[int], most: int, factor: int
) -> tuple[Shape, ...]:
    """At most `most` of `candidates`, ascending, that pad the steps of `demands` least.

    Every step that has a graph with all candidates together keeps one; the first and the last candidate are always
    chosen. Exact: with D_k(i) the least work of the steps up to candidate i, the last of at most k chosen ones, D_k(i)
    is the minimum over j of D_{k−1}(j) + candidate i times the steps in between, where no step is left out: candidate i
    is at most `factor` times the number after candidate j. Takes O(most · candidates²). Raises InputError where `most`
    numbers leave steps without a graph.
    """
    indices = np.asarray(candidates, np.int64)
    weights = np.zeros(len(indices))
    for (value,), demand in demands.items():
        index = int(np.searchsorted(indices, value))
        if index < len(indices) and indices[index] <= factor * value:
            weights[index] += demand.steps
    total = np.cumsum(weights)
    step = indices[None, :] * (total[None, :] - total[:, None])
    allowed = (np.arange(len(indices))[:, None] < np.arange(len(indices))) & (
        indices <= factor * (indices[:, None] + 1)
    )
    step[~allowed] = np.inf
    best = np.full(len(indices), np.inf)
    best[0] = indices[0] * weights[0]
    sources: list[NDArray[np.int64]] = []
    finals = [best[-1]]
    for _ in range(1, min(most, len(indices))):
        sums = best[:, None] + step
        sources.append(sums.argmin(0))
        best = sums.min(0)
        finals.append(best[-1])
    chosen = int(np.argmin(finals))
    if not np.isfinite(finals[chosen]):
        raise InputError(f"at most {most} graphs, but {_least(indices, factor)} are needed for every step to have one")
    found = [len(indices) - 1]
    for source in reversed(sources[:chosen]):
        found.append(int(source[found[-1]]))
    return tuple((int(indices[index]),) for index in reversed(found))


def _least(indices: NDArray[np.int64], factor: int) -> int:
    """The number of candidates needed from the first to the last without leaving out a step."""
    count, index = 1, 0
    while index < len(indices) - 1:
        index = int(np.searchsorted(indices, factor * (indices[index] + 1), "right")) - 1
        count += 1
    return count
