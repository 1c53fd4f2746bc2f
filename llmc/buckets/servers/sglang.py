"""SGLang on CUDA and ROCm: the requests of a decode step that CUDA graphs are captured for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from llmc.buckets.limits import Limits
from llmc.buckets.servers import arguments, line
from llmc.buckets.servers.base import Accepted, Demand, Dropped, Export, Finder, GraphCost, Lists, Setup, Shape
from llmc.buckets.servers.requests import DECODE, DecodeBatches, prefill_first
from llmc.buckets.servers.settings import Setting, within
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import StepTime
from llmc.errors import InputError

SIZES = "--cuda-graph-bs-decode"
OLDER = "--cuda-graph-bs"
CONFIG = "--cuda-graph-config"

LIMITS = {
    "--context-length": "max_model_len",
    "--max-running-requests": "max_num_seqs",
    "--chunked-prefill-size": "max_num_batched_tokens",
}

_LOGGED = re.compile(r"Capture cuda graph bs \[([\d,\s]+)\]|Capture target (?:decode|verify) CUDA .*?bs=\[([\d,\s]+)\]")

TIERS = ((20, 8, 8), (35, 48, 160), (60, 32, 160), (160, 256, 512))
"""Below so many GiB of a card's memory: the largest batch captured with tp_size below 4, and from there."""


class Sglang(DecodeBatches):
    """Decode graphs alone. Graphs of prompt steps (cuda_graph_config.prefill), data-parallel attention and the DeepEP
    cap are left out."""

    name: ClassVar[str] = "sglang"
    title: ClassVar[str] = "SGLang on CUDA and ROCm"
    source: ClassVar[str] = (
        "SGLang, commits 399499ca (arg_groups/cuda_graph_hook.py), a82da8da (arg_groups/memory_hook.py), e55d1556 "
        "(model_executor/runner/base_cuda_graph_runner.py), aba9610a (runner/decode_cuda_graph_runner.py)"
    )
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting("gpu_memory_gib", int, 80, "Memory of one card, which the largest batch depends on.", least=1),
        Setting("tp_size", int, 1, "Devices of one model.", "--tp-size", least=1),
        Setting(
            "cuda_graph_max_bs_decode", int, None, "The largest batch of SGLang's own list.",
            "--cuda-graph-max-bs-decode", least=1,
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
    cost: ClassVar[GraphCost] = GraphCost(
        None,
        2 << 20,
        "SGLang itself reserves 2 MiB for each request of the largest batch (arg_groups/memory_hook.py); no seconds of "
        'a graph were published: the log has them as "CUDA graph end. elapsed="',
    )

    def limits(self, given: Mapping[str, int]) -> Limits:
        """max_running_requests 2048, the least that SGLang derives from its memory, and chunked_prefill_size 8192, as
        on cards of 60 to 160 GiB."""
        return Limits(**{"max_num_seqs": 2048, "max_num_batched_tokens": 8192, "block_size": 1, **given})

    def default(self, setup: Setup) -> Lists:
        """1, 2, 4, 8, 12, then steps of 8 to 256, of 16 to 512 and of 32, up to a batch that the card's memory
        decides, which is always in it; finer with drafts; every number without padding."""
        most = self._largest(setup)
        if setup.own["disable_cuda_graph_padding"]:
            sizes = [*range(1, most + 1)]
        elif setup.number("speculative_num_draft_tokens"):
            sizes = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, most + 1, 16)]
        else:
            sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most + 1, 32)]
        return {DECODE: self._captured(setup, [*(size for size in sizes if size <= most), most])}

    def accept(self, setup: Setup, lists: Lists) -> Accepted:
        """Batches above max_running_requests are left out and it takes their place; with two-batch overlap odd ones
        are left out too."""
        given = [size for (size,) in lists[DECODE]]
        kept = self._captured(setup, given)
        pool = self._pool(setup)
        dropped = tuple(
            Dropped(DECODE, (size,), f"above max_running_requests {pool}" if size > pool else "odd, with batch overlap")
            for size in given
            if (size,) not in kept
        )
        return Accepted({DECODE: kept}, dropped, tuple((DECODE, shape) for shape in kept if shape[0] not in given))

    def demands(self, setup: Setup, requests: Iterable[TrafficRequest], step_time: StepTime) -> Iterator[Demand]:
        """Decode steps, which wait while prompts run."""
        return prefill_first(requests, setup.limits, step_time)

    def finder(self, setup: Setup, family: str, shapes: Sequence[Shape]) -> Finder:
        """The next batch above, or the same one alone without padding; others run eagerly."""
        exact = setup.own["disable_cuda_graph_padding"]
        return line.Exact(shapes, "eager") if exact else line.NextAbove(shapes, "eager")

    def propose(self, setup: Setup, demands: Mapping[str, Mapping[Shape, Demand]], most: Mapping[str, int]) -> Lists:
        """Up to where SGLang's own list reaches, so that no step loses its graph."""
        step = self._step(setup)
        top = self.default(setup)[DECODE][-1][0]
        found, candidates = demands.get(DECODE, {}), range(step, top + 1, step)
        if setup.own["disable_cuda_graph_padding"]:
            return {DECODE: line.most_frequent(found, candidates, most[DECODE]) or ((top,),)}
        return {DECODE: line.choose(found, candidates, [top], most[DECODE])}

    def export(self, setup: Setup, lists: Lists) -> Export:
        """--cuda-graph-bs-decode, with the limits and settings that it holds for."""
        words = arguments.limit_flags(setup.limits, LIMITS)
        words.append(f"{SIZES} {' '.join(str(size) for (size,) in lists[DECODE])}")
        for setting in self.settings:
            value = setup.own[setting.name]
            if setting.flag and setting.name != "cuda_graph_max_bs_decode" and value != setting.default:
                words.append(setting.flag if value is True else f"{setting.flag} {value}")
        return Export({}, tuple(words))

    def read(self, given: Export, setup: Setup) -> Lists:
        """--cuda-graph-bs-decode, its older name --cuda-graph-bs, or decode.bs of --cuda-graph-config; else SGLang's
        own list."""
        flags = arguments.flags(given)
        arguments.agree(flags, setup.limits, LIMITS)
        stated = {name: line.written_numbers(flags[name], name) for name in (SIZES, OLDER) if name in flags}
        found = within(CONFIG, flags[CONFIG], ("decode", "bs")) if CONFIG in flags else None
        if found is not None:
            stated[CONFIG] = line.numbers(found, f"{CONFIG}.decode.bs")
        if len(stated) > 1:
            raise InputError(f"{' and '.join(stated)} both state a list; keep one of them")
        return {DECODE: next(iter(stated.values()))} if stated else self.default(setup)

    def read_log(self, lines: Iterable[str]) -> Lists | None:
        """The list of the line with which SGLang begins to capture decode graphs; the last such line."""
        found = None
        for text in lines:
            if match := _LOGGED.search(text):
                found = line.written_numbers(match[1] or match[2], SIZES)
        return {DECODE: found} if found else None

    def _largest(self, setup: Setup) -> int:
        given = setup.own["cuda_graph_max_bs_decode"]
        if isinstance(given, int):
            return given
        wide = setup.number("tp_size") >= 4
        for below, narrow_most, wide_most in TIERS:
            if setup.number("gpu_memory_gib") < below:
                return wide_most if wide else narrow_most
        return 512

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
