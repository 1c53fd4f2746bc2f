"""vLLM on CUDA and ROCm: one list, the token counts of steps with captured CUDA graphs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

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
    Finder,
    GraphCost,
    GraphDemand,
    GraphFamily,
    Lists,
    Setup,
    Shape,
)
from llmc.integrations.settings import SPECULATIVE, Setting, release, within

TOKENS = "tokens"
CONFIG, SIZES, LARGEST = "--compilation-config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"
MOST_BY_DEFAULT, MOST_ON_BLACKWELL = 512, 1024
"""Largest tokens in vLLM's own list."""
NEWEST = "0.33"

_LOGGED = re.compile(r"""(?:['"]cudagraph_capture_sizes['"]: ?|is overridden by config )\[([\d,\s]*)\]""")


class Vllm(BucketRules):
    """The rules of vllm/config/vllm.py (_set_cudagraph_sizes), vllm/config/compilation.py
    (adjust_cudagraph_sizes_for_spec_decode), vllm/v1/cudagraph_dispatcher.py and, for Model Runner V2,
    vllm/v1/worker/gpu/cudagraph_utils.py; vllm/engine/arg_utils.py has the limits. tests/oracles/ compares them with
    vLLM's own functions. ROCm captures the same sizes; there, context parallelism turns full graphs into PIECEWISE
    (vllm/platforms/rocm.py).

    Changes between releases:

        0.17  performance_mode
        0.21  max_num_batched_tokens joins the list
        0.28  sizes to 1,024 on data-center Blackwell
        0.29  with drafts, tokens of 1, 2, 4, 8 … decoding sequences; Model Runner V2 is the default
        0.31  without drafts, max_num_seqs
        0.32  no sequence parallelism (enable_sp)
    """

    name = "vllm"
    title = "vLLM on CUDA and ROCm"
    source = (
        "vLLM 0.13 to 0.33: vllm/config/vllm.py, vllm/config/compilation.py, vllm/v1/cudagraph_dispatcher.py, "
        "vllm/v1/worker/gpu/cudagraph_utils.py"
    )
    families = (GraphFamily(TOKENS, ("tokens",), "tokens"),)
    settings = (
        Setting("release", str, NEWEST, "vLLM's release, as 0.24; --server vllm@0.24 is the same."),
        Setting(
            "use_v2_model_runner", bool, None, "Model Runner V2. Default: from 0.29 on.",
            variable="VLLM_USE_V2_MODEL_RUNNER",
        ),
        Setting("blackwell", bool, False, "Data-center Blackwell GPUs (compute capability 10.x)."),
        *SPECULATIVE,
        Setting(LARGEST, int, None, "Tokens that vLLM's own list stops at.", CONFIG, path=(LARGEST,), least=1),
        Setting(
            "cudagraph_mode", str, "FULL_AND_PIECEWISE", "Which steps run as graphs.", CONFIG,
            path=("cudagraph_mode",),
            choices=("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"),
        ),
        Setting(
            "performance_mode", str, "balanced", "interactivity captures every size to 32.", "--performance-mode",
            choices=("balanced", "interactivity", "throughput"),
        ),
        Setting("tensor_parallel_size", int, 1, "Devices of one model.", "--tensor-parallel-size", least=1),
        Setting(
            "enable_sp", bool, False, "Sequence parallelism, before 0.32: sizes are multiples of "
            "tensor_parallel_size.", CONFIG, path=("pass_config", "enable_sp"),
        ),
    )  # fmt: skip
    miss = "eager"
    logged = MappingProxyType({"release": re.compile(r"(?:API server version|LLM engine \(v)\s*(\d+\.\d+)")})
    cost = GraphCost(
        0.05, 16 << 20,
        "Llama-3.1-8B-Instruct, each graph timed: 0.048 s and 6 MiB at 96 tokens, 0.057 s and 26 MiB at 464 "
        "(vllm#22897, vllm#23184)",
    )  # fmt: skip

    def limits(self, given: Mapping[str, int]) -> Limits:
        """Return the limits of `vllm serve` on GPUs of less than 70 GiB, and on A100: max_num_seqs 256,
        max_num_batched_tokens 2048.

        Each is bounded by the other where it is not given. Larger GPUs use 1024 and 8192.
        """
        length = given["max_model_len"]
        tokens = given.get("max_num_batched_tokens", min(2048, given.get("max_num_seqs", 256) * length))
        seqs = given.get("max_num_seqs", min(256, tokens))
        block = {"block_size": min(16, length)}
        return Limits(**{**block, **given, "max_num_seqs": seqs, "max_num_batched_tokens": tokens})

    def default(self, setup: Setup) -> Lists:
        """Return vLLM's own list: 1, 2, 4, multiples of 8 below 256 and of 16 from there, up to min(2 · max_num_seqs ·
        (k + 1), 512).

        It includes max_num_batched_tokens where that is no more, and with interactivity all from 1 to 32. From 0.29 on
        it includes the tokens of decode steps with k drafts, and from 0.31 on max_num_seqs.
        """
        if setup.own["cudagraph_mode"] == "NONE":
            return {TOKENS: ()}
        release, tokens, most = self._release(setup), setup.limits.max_num_batched_tokens, self._most(setup)
        interactive = setup.own["performance_mode"] == "interactivity" and release >= (0, 17)
        sizes = {*(range(1, 33) if interactive else (1, 2, 4)), *range(8, 256, 8), *range(256, most + 1, 16)}
        if release >= (0, 21):
            sizes.add(tokens)
        sizes = {size for size in sizes if size <= most} | self._decode_sizes(setup)
        return {TOKENS: self._rounded(setup, sorted(size for size in sizes if size % self._devices(setup) == 0))}

    def accept(self, setup: Setup, lists: Lists) -> Accepted:
        """Drop sizes above max_num_batched_tokens, and with sequence parallelism other than multiples of
        tensor_parallel_size.

        Where decode steps have full graphs, k drafts round all sizes up to multiples of k + 1; results above the
        largest size are dropped.
        """
        if setup.own["cudagraph_mode"] == "NONE":
            raise InputError("vllm: cudagraph_mode NONE captures no graphs; choose another mode, or give no list")
        limit, devices = setup.limits.max_num_batched_tokens, self._devices(setup)
        dropped, kept = [], []
        for (size,) in lists[TOKENS]:
            if size > limit:
                dropped.append(Dropped(TOKENS, (size,), f"above max_num_batched_tokens {limit}"))
            elif size % devices:
                dropped.append(Dropped(TOKENS, (size,), f"not a multiple of tensor_parallel_size {devices}"))
            else:
                kept.append(size)
        if not kept:
            raise InputError(
                f"vllm: no {SIZES} at or below max_num_batched_tokens {limit}"
                + (f" that is a multiple of tensor_parallel_size {devices}" if devices > 1 else "")
                + "; give one"
            )
        rounded = self._rounded(setup, sorted(set(kept)))
        reason = f"not a multiple of {self._query(setup)}, the tokens of a drafted step"
        dropped += [Dropped(TOKENS, (size,), reason) for size in kept if (size,) not in rounded]
        return Accepted.of(lists, {TOKENS: rounded}, dropped)

    def demands(self, setup: Setup, requests: Iterable[TrafficRequest], step_time: StepTime) -> Iterator[GraphDemand]:
        """Yield all tokens of a step, of prompts and decodes together.

        Under FULL_DECODE_ONLY only steps without prompts count, and under NONE no step, since no list changes the
        others.
        """
        mode, drafts = setup.own["cudagraph_mode"], self._query(setup) - 1
        if mode == "NONE":
            return
        for steps in chunked_steps(requests, setup.limits, step_time):
            if mode != "FULL_DECODE_ONLY" or not steps.chunks:
                tokens = steps.tokens + drafts * len(steps.cached)
                yield GraphDemand(TOKENS, (tokens,), steps.steps, tokens * steps.steps)

    def finder(self, setup: Setup, family: str, shapes: Sequence[Shape]) -> Finder:
        """Return the look-up of the next size above.

        Under FULL_DECODE_ONLY a size serves only where max_num_seqs sequences can fill it, and a step that would be
        padded to a larger one runs eagerly.
        """
        if setup.own["cudagraph_mode"] == "FULL_DECODE_ONLY":
            shapes = line.shapes(self._full(setup, shapes))
        return super().finder(setup, family, shapes)

    def graphs(self, setup: Setup, lists: Lists) -> int:
        """Return the number of graphs: each size once for steps with prompts (piecewise), and once for decode steps
        (full).

        Full graphs exist only for sizes that max_num_seqs sequences reach.
        """
        sizes, full = len(lists[TOKENS]), len(self._full(setup, lists[TOKENS]))
        counts = {"NONE": 0, "FULL_DECODE_ONLY": full, "FULL_AND_PIECEWISE": sizes + full}
        return counts.get(str(setup.own["cudagraph_mode"]), sizes)

    def propose(self, setup: Setup, demands: Demands, most: Mapping[str, int]) -> Lists:
        """Propose a list that reaches as far as vLLM's own, so that no step loses its graph.

        It includes the most tokens of a decode step, so that none falls back from a full graph to a piecewise one.
        """
        own = self.default(setup)[TOKENS]
        if not own:
            raise InputError("vllm: there are no graphs to plan for; choose a cudagraph_mode other than NONE")
        multiple = self._multiple(setup)
        top, reach = (-(-tokens // multiple) * multiple for tokens in (own[-1][0], self._reach(setup)))
        if top > setup.limits.max_num_batched_tokens:
            top -= multiple
        if setup.own["cudagraph_mode"] == "FULL_DECODE_ONLY":
            top = min(top, reach)
        required = {top, min(top, reach)}
        candidates = range(multiple, top + 1, multiple)
        return {TOKENS: line.choose(demands.get(TOKENS, {}), candidates, required, most[TOKENS])}

    def from_plan(self, setup: Setup, plan: Plan) -> Lists:
        """Return the batches of decode buckets, and the tokens of prompt buckets within vLLM's own list."""
        query, most = self._query(setup), self._most(setup)
        sizes = {bucket.batch * query for bucket in plan.decode}
        sizes |= {bucket.tokens for bucket in plan.prompt if bucket.tokens <= most}
        return {TOKENS: line.shapes(sizes)}

    def export(self, setup: Setup, lists: Lists) -> Export:
        """Export --compilation-config, also as a file for --config."""
        own = setup.own
        config: dict[str, object] = {SIZES: line.values(lists[TOKENS]), "cudagraph_mode": own["cudagraph_mode"]}
        if own["enable_sp"]:
            config["pass_config"] = {"enable_sp": True}
        words = arguments.limit_flags(setup.limits)
        if setup.number("tensor_parallel_size") > 1:
            words.append(f"--tensor-parallel-size {own['tensor_parallel_size']}")
        return arguments.vllm_export([*words, arguments.json_flag(CONFIG, config), *arguments.drafts_flag(setup)])

    def read(self, given: Export, setup: Setup) -> Lists:
        """Return cudagraph_capture_sizes of --compilation-config (-O), or --cudagraph-capture-sizes.

        Before 0.11 the latter is --cuda-graph-sizes. Flags are on the command line or in a file for --config; the
        default is vLLM's own list.
        """
        flags = arguments.flags(given)
        if flags.get("--enforce-eager", "false") != "false":
            raise InputError("--enforce-eager: vLLM runs without graphs; leave it out to plan them")
        if (level := flags.get("--optimization-level", "3")) not in ("2", "3"):
            raise InputError(f"-O{level} changes which steps have graphs; leave it out and state cudagraph_mode")
        arguments.agree(flags, setup.limits)
        stated: dict[str, tuple[Shape, ...]] = {}
        found = within(CONFIG, flags[CONFIG], (SIZES,)) if CONFIG in flags else None
        if found is not None:
            stated[f"{CONFIG}.{SIZES}"] = line.numbers(found, f"{CONFIG}.{SIZES}")
        for name in ("--cudagraph-capture-sizes", "--cuda-graph-sizes"):
            if name in flags:
                stated[name] = line.written_numbers(flags[name], name)
        if len(stated) > 1:
            raise InputError(f"{' and '.join(stated)} both state a list; vLLM takes one of them, so remove the other")
        if not stated:
            return self.default(setup)
        ((name, sizes),) = stated.items()
        if name == "--cuda-graph-sizes" and len(sizes) == 1:  # 0.9 and 0.10: one number is the largest
            sizes = line.shapes([1, 2, 4, *range(8, sizes[0][0] + 1, 8)])
        self._check_largest(setup, flags, sizes)
        return {TOKENS: sizes}

    def read_log(self, lines: Iterable[str]) -> Lists | None:
        """Return the last list in the configuration that vLLM prints at start, or in its warning on dropped sizes."""
        found: tuple[Shape, ...] = ()
        for text in lines:
            for match in _LOGGED.finditer(text):
                found = line.written_numbers(match[1], SIZES) if match[1].strip() else found
        return {TOKENS: found} if found else None

    def _check_largest(self, setup: Setup, flags: Mapping[str, str], sizes: Sequence[Shape]) -> None:
        """Raise InputError where a stated max_cudagraph_capture_size is not the largest kept size."""
        largest: object = within(CONFIG, flags[CONFIG], (LARGEST,)) if CONFIG in flags else None
        if largest is None and "--max-cudagraph-capture-size" in flags:
            name = "--max-cudagraph-capture-size"
            ((largest,),) = line.written_numbers(flags[name], name)[-1:]
        most, devices = setup.limits.max_num_batched_tokens, self._devices(setup)
        kept = [size for (size,) in sizes if size <= most and size % devices == 0]
        if largest is not None and kept and largest != kept[-1]:
            raise InputError(f"{LARGEST} {largest} is not the largest of {SIZES}, {kept[-1]}; remove it")

    def _release(self, setup: Setup) -> tuple[int, ...]:
        return release("vllm", str(setup.own["release"]))

    def _v2(self, setup: Setup) -> bool:
        given = setup.own["use_v2_model_runner"]
        return self._release(setup) >= (0, 29) if given is None else bool(given)

    def _query(self, setup: Setup) -> int:
        return 1 + setup.number("num_speculative_tokens")

    def _devices(self, setup: Setup) -> int:
        """The divisor of all sizes under sequence parallelism. Raises InputError for a release without it."""
        if setup.own["enable_sp"] and self._release(setup) >= (0, 32):
            raise InputError("vllm: enable_sp does not exist from release 0.32 on; leave it out, or name the release")
        return setup.number("tensor_parallel_size") if setup.own["enable_sp"] else 1

    def _reach(self, setup: Setup) -> int:
        """The most tokens of a step that only decodes."""
        return self._query(setup) * setup.limits.max_num_seqs

    def _cap(self, setup: Setup) -> int:
        wide = setup.own["blackwell"] and self._release(setup) >= (0, 28)
        return MOST_ON_BLACKWELL if wide else MOST_BY_DEFAULT

    def _most(self, setup: Setup) -> int:
        """The largest size by the setting, or vLLM's own, limited by max_num_batched_tokens."""
        given = setup.own[LARGEST]
        most = given if isinstance(given, int) else min(2 * self._reach(setup), self._cap(setup))
        return min(most, setup.limits.max_num_batched_tokens)

    def _decode_sizes(self, setup: Setup) -> set[int]:
        """Tokens of the decode steps that vLLM adds to its own list, unless max_cudagraph_capture_size is stated."""
        release, query, seqs = self._release(setup), self._query(setup), setup.limits.max_num_seqs
        if setup.own[LARGEST] is not None or release < ((0, 31) if query == 1 else (0, 29)):
            return set()
        most = min(seqs, self._cap(setup))
        counts = {1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16), most} if query > 1 else {seqs}
        return {count * query for count in counts if count <= seqs and count * query <= self._most(setup)}

    def _full(self, setup: Setup, shapes: Sequence[Shape]) -> list[int]:
        """Tokens of the full graphs of decode steps, ascending: sizes that max_num_seqs sequences can fill.

        Model Runner V2 rounds each up to whole sequences; V1 has already rounded the list.
        """
        query, reach = self._query(setup), self._reach(setup)
        sizes = [size for (size,) in shapes]
        if sizes and self._v2(setup):
            sizes = sorted({-(-size // query) * query for size in sizes if -(-size // query) * query <= sizes[-1]})
        return [size for size in sizes if query <= size <= reach]

    def _multiple(self, setup: Setup) -> int:
        """The divisor of sizes for full graphs of decode steps. Raises InputError where drafts and sequence parallelism
        disagree.
        """
        query, devices = self._query(setup), self._devices(setup)
        if query == 1 or setup.own["cudagraph_mode"] == "PIECEWISE":
            return devices
        multiple = math.lcm(query, devices)
        if multiple != max(query, devices) and not self._v2(setup):
            raise InputError(
                f"vllm: no size is a multiple of both {query} (num_speculative_tokens + 1) and {devices} "
                "(tensor_parallel_size, with sequence parallelism); change one or switch enable_sp off"
            )
        return multiple

    def _rounded(self, setup: Setup, sizes: Sequence[int]) -> tuple[Shape, ...]:
        """Ascending `sizes` rounded up to multiples by Model Runner V1; results above the largest of `sizes` are
        dropped.
        """
        if not sizes or self._v2(setup) or (multiple := self._multiple(setup)) == self._devices(setup):
            return line.shapes(sizes)
        kept = {size for size in (-(-size // multiple) * multiple for size in sizes) if size <= sizes[-1]}
        if not kept and multiple > sizes[-1]:
            raise InputError(
                f"vllm: a drafted step has {multiple} tokens, more than the largest size {sizes[-1]}; give a size of "
                f"{multiple} or more, or lower num_speculative_tokens"
            )
        return line.shapes(kept or [multiple])
