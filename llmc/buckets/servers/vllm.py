"""vLLM on CUDA and ROCm: one list, the tokens of a step that CUDA graphs are captured for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.servers import line
from llmc.buckets.servers.base import (
    Accepted,
    Demand,
    Dropped,
    Export,
    Family,
    Finder,
    GraphCost,
    Lists,
    Setup,
    Shape,
)
from llmc.buckets.servers.settings import Setting, flags_of, within
from llmc.buckets.traffic.chunked import chunked_steps
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import StepTime
from llmc.errors import InputError

TOKENS = "tokens"
CONFIG = "--compilation-config"
SIZES = "cudagraph_capture_sizes"
MOST_BY_DEFAULT = 512
"""Tokens that vLLM's own list stops at."""

_LOGGED = re.compile(r"""['"]?cudagraph_capture_sizes['"]?\s*[:=]\s*\[([\d,\s]*)\]""")


class Vllm:
    """The rules of vllm/config/vllm.py (_set_cudagraph_sizes), vllm/config/compilation.py
    (adjust_cudagraph_sizes_for_spec_decode) and vllm/v1/cudagraph_dispatcher.py."""

    name: ClassVar[str] = "vllm"
    title: ClassVar[str] = "vLLM on CUDA and ROCm"
    source: ClassVar[str] = "vLLM 0.11 to 0.22: vllm/config/vllm.py, vllm/config/compilation.py, vllm/v1"
    families: ClassVar[tuple[Family, ...]] = (Family(TOKENS, ("tokens",), "tokens"),)
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(
            "num_speculative_tokens", int, 0, "Draft tokens of a step.", "--speculative-config",
            path=("num_speculative_tokens",), least=0,
        ),
        Setting(
            "max_cudagraph_capture_size", int, None, "Tokens that vLLM's own list stops at.", CONFIG,
            path=("max_cudagraph_capture_size",), least=1,
        ),
        Setting(
            "cudagraph_mode", str, "FULL_AND_PIECEWISE", "Which steps run as graphs.", CONFIG,
            path=("cudagraph_mode",),
            choices=("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"),
        ),
    )  # fmt: skip
    cost: ClassVar[GraphCost] = GraphCost(None, None, 'not published by the project; see the log\'s "Graph capturing"')

    def limits(self, given: Mapping[str, int]) -> Limits:
        """max_num_seqs 256, max_num_batched_tokens 2048 and blocks of 16, vLLM's least defaults."""
        given = {"max_num_seqs": 256, "block_size": 16, **given}
        given.setdefault("max_num_batched_tokens", max(2048, given["max_num_seqs"]))
        return Limits(**given)

    def default(self, setup: Setup) -> Lists:
        """1, 2, 4, multiples of 8 below 256 and of 16 from there, up to min(2 · max_num_seqs · (k + 1), 512)."""
        most = self._most(setup)
        sizes = [1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)]
        return {TOKENS: self._rounded(setup, [size for size in sizes if size <= most], most)}

    def accept(self, setup: Setup, lists: Lists) -> Accepted:
        """Sizes above max_num_batched_tokens are left out; with k drafts all become multiples of k + 1."""
        most = setup.limits.max_num_batched_tokens
        given = [size for (size,) in lists[TOKENS]]
        kept = [size for size in given if size <= most]
        if not kept:
            raise InputError(f"vllm: no {SIZES} at or below max_num_batched_tokens {most}; give one")
        dropped = [
            Dropped(TOKENS, (size,), f"above max_num_batched_tokens {most}") for size in given if size not in kept
        ]
        rounded = self._rounded(setup, kept, kept[-1])
        changed = [(size,) for size in kept if (size,) not in rounded]
        multiple = self._query(setup)
        dropped += [
            Dropped(TOKENS, size, f"no multiple of {multiple}, the tokens of a drafted step") for size in changed
        ]
        added = tuple((TOKENS, size) for size in rounded if size[0] not in kept)
        return Accepted({TOKENS: rounded}, tuple(dropped), added)

    def demands(self, setup: Setup, requests: Iterable[TrafficRequest], step_time: StepTime) -> Iterator[Demand]:
        """All tokens of a step, prompts' and decodes' together."""
        query = self._query(setup)
        for steps in chunked_steps(requests, setup.limits, step_time):
            tokens = steps.tokens + (query - 1) * len(steps.cached)
            yield Demand(TOKENS, (tokens,), steps.steps, tokens * steps.steps)

    def finder(self, setup: Setup, family: str, shapes: Sequence[Shape]) -> Finder:
        """The next size above; a larger step runs eagerly, without padding."""
        return line.NextAbove(shapes, "eager")

    def work(self, setup: Setup, family: str, shape: Shape) -> int:
        """The tokens of the step."""
        return shape[0]

    def graphs(self, setup: Setup, lists: Lists) -> int:
        """Each size once for steps with prompts (piecewise), and once for those that only decode (full), so far as
        max_num_seqs sequences reach."""
        query, mode = self._query(setup), setup.own["cudagraph_mode"]
        sizes = [size for (size,) in lists[TOKENS]]
        full = sum(query <= size <= query * setup.limits.max_num_seqs for size in sizes)
        return {
            "NONE": 0,
            "PIECEWISE": len(sizes),
            "FULL": len(sizes),
            "FULL_DECODE_ONLY": full,
            "FULL_AND_PIECEWISE": len(sizes) + full,
        }[str(mode)]

    def propose(self, setup: Setup, demands: Mapping[str, Mapping[Shape, Demand]], most: Mapping[str, int]) -> Lists:
        """Any multiples of k + 1, up to where vLLM's own list reaches, so that no step loses its graph."""
        query, top = self._query(setup), self.default(setup)[TOKENS][-1][0]
        candidates = range(query, top + 1, query)
        return {TOKENS: line.choose(demands.get(TOKENS, {}), candidates, [top], most[TOKENS])}

    def from_plan(self, setup: Setup, plan: Plan) -> Lists:
        """The batches of decode buckets, and the tokens of prompt buckets that vLLM's own list would reach."""
        query, most = self._query(setup), self._most(setup)
        sizes = {bucket.batch * query for bucket in plan.decode}
        sizes |= {bucket.tokens for bucket in plan.prompt if bucket.tokens <= most}
        return {TOKENS: line.shapes(sizes)}

    def export(self, setup: Setup, lists: Lists) -> Export:
        """--compilation-config, and the same as a file for --config."""
        sizes = [size for (size,) in lists[TOKENS]]
        text = json.dumps({SIZES: sizes, "cudagraph_mode": setup.own["cudagraph_mode"]})
        limits = setup.limits
        numbers = {
            "max-model-len": limits.max_model_len,
            "max-num-seqs": limits.max_num_seqs,
            "max-num-batched-tokens": limits.max_num_batched_tokens,
        }
        arguments = [*(f"--{name} {value}" for name, value in numbers.items()), f"{CONFIG} {text}"]
        if drafts := setup.number("num_speculative_tokens"):
            arguments.append(f"--speculative-config {json.dumps({'num_speculative_tokens': drafts})}")
        config = "".join(f"{name}: {value}\n" for name, value in numbers.items()) + f"compilation-config: '{text}'\n"
        return Export({}, tuple(arguments), {"config.yaml": config})

    def read(self, given: Export, setup: Setup) -> Lists:
        """cudagraph_capture_sizes of --compilation-config, else vLLM's own list."""
        flags = flags_of([word for argument in given.arguments for word in argument.split(" ", 1)])
        found = within(CONFIG, flags[CONFIG], (SIZES,)) if CONFIG in flags else None
        if found is None:
            return self.default(setup)
        if not isinstance(found, list) or not found or not all(type(size) is int and size > 0 for size in found):
            raise InputError(f"{CONFIG}.{SIZES} must be a list of whole numbers above 0, as in [1, 2, 4, 8]")
        return {TOKENS: line.shapes(found)}

    def read_log(self, lines: Iterable[str]) -> Lists | None:
        """The list in the configuration that vLLM prints when the engine starts."""
        found = None
        for text in lines:
            if match := _LOGGED.search(text):
                found = line.shapes(int(size) for size in match[1].split(",") if size.strip())
        return None if not found else {TOKENS: found}

    def _query(self, setup: Setup) -> int:
        return 1 + setup.number("num_speculative_tokens")

    def _most(self, setup: Setup) -> int:
        given = setup.own["max_cudagraph_capture_size"]
        most = (
            given
            if isinstance(given, int)
            else min(setup.limits.max_num_seqs * self._query(setup) * 2, MOST_BY_DEFAULT)
        )
        return min(most, setup.limits.max_num_batched_tokens)

    def _rounded(self, setup: Setup, sizes: Iterable[int], most: int) -> tuple[Shape, ...]:
        """`sizes` rounded up to multiples of k + 1, those above `most` left out; k + 1 itself where none is left."""
        query = self._query(setup)
        rounded = {-(-size // query) * query for size in sizes}
        kept = [size for size in rounded if size <= most] if query > 1 else rounded
        return line.shapes(kept or [query])
