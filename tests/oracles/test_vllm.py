"""Capture sizes and look-ups by vLLM's own functions, of several releases, and by llmc's rules."""

from __future__ import annotations

import enum
import logging
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import Setup
from llmc.integrations.settings import complete
from tests.oracles.conftest import releases
from tests.oracles.sources import extract, parameters, source

pytestmark = pytest.mark.oracle
VLLM = bucket_rules("vllm")
CASES = 500
MODES = ("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


class Mode(enum.Enum):
    """CUDAGraphMode, as vllm/config/compilation.py has it: a pair is (mixed, decode)."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    def decode_mode(self) -> Mode:
        return Mode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> Mode:
        return Mode(self.value[1]) if isinstance(self.value, tuple) else self

    def separate_routine(self) -> bool:
        return isinstance(self.value, tuple)

    def __bool__(self) -> bool:
        return self is not Mode.NONE


@dataclass(frozen=True)
class Case:
    """One configuration of vLLM, drawn at random."""

    seqs: int
    tokens: int
    drafts: int
    mode: str
    performance: str
    blackwell: bool
    devices: int
    sequence_parallel: bool
    given: tuple[int, ...] | None
    largest: int | None


def draw(random_: random.Random, with_sp: bool) -> Case:
    seqs = random_.choice([random_.randint(1, 1024), random_.choice([1, 8, 32, 128, 256, 512, 1024])])
    tokens = max(seqs, random_.choice([random_.randint(1, 16384), 2048, 8192]))
    given = None
    if random_.random() < 0.4:
        given = tuple(random_.sample(range(1, 600), random_.randint(1, 40)))
    return Case(
        seqs, tokens, random_.choice([0, 0, 1, 2, 3, 5, 16]), random_.choice(MODES),
        random_.choice(["balanced", "balanced", "interactivity"]), random_.random() < 0.2, random_.choice([1, 2, 4]),
        with_sp and random_.random() < 0.3, given,
        random_.choice([None, None, random_.randint(1, 1500)]) if given is None else None,
    )  # fmt: skip


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def of_vllm(root: Path, case: Case, v2: bool) -> list[int] | None:
    """The sizes by vLLM's functions. None where it refuses the configuration, or goes on with no graph, which llmc
    refuses."""
    config = source(root, "vllm/config/vllm.py")
    compilation = source(root, "vllm/config/compilation.py")
    passes = SimpleNamespace(enable_sp=case.sequence_parallel)
    space = {
        "CUDAGraphMode": Mode, "logger": logging.getLogger("vllm"), "round_up": round_up,
        "current_platform": SimpleNamespace(is_device_capability_family=lambda n: case.blackwell and n == 100),
    }  # fmt: skip
    held = SimpleNamespace(
        cudagraph_mode=Mode[case.mode], max_cudagraph_capture_size=case.largest, pass_config=passes,
        cudagraph_capture_sizes=None if case.given is None else list(case.given),
        post_init_cudagraph_sizes=lambda: None, compute_bs_to_padded_graph_size=lambda: None,
    )  # fmt: skip
    speculative = SimpleNamespace(num_speculative_tokens=case.drafts, uses_dynamic_speculative_decoding=lambda: False)
    this = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False), compilation_config=held, performance_mode=case.performance,
        scheduler_config=SimpleNamespace(max_num_seqs=case.seqs, max_num_batched_tokens=case.tokens),
        parallel_config=SimpleNamespace(tensor_parallel_size=case.devices),
        speculative_config=speculative if case.drafts else None, num_speculative_tokens=case.drafts,
        uniform_decode_query_len=1 + case.drafts,
        update_sizes_for_sequence_parallelism=lambda sizes: [size for size in sizes if size % case.devices == 0],
    )  # fmt: skip
    try:
        extract(config, "_set_cudagraph_sizes", space)(this)
        if not v2 and case.drafts and Mode[case.mode].decode_mode() is Mode.FULL:
            adjust = extract(compilation, "adjust_cudagraph_sizes_for_spec_decode", space)
            takes_devices = "tensor_parallel_size" in parameters(compilation, "adjust_cudagraph_sizes_for_spec_decode")
            adjust(held, 1 + case.drafts, *([case.devices] if takes_devices else []))
    except (ValueError, AssertionError):
        return None
    return list(held.cudagraph_capture_sizes) or None


def setup(case: Case, release: str, v2: bool) -> Setup:
    limits = {"max_model_len": 8192, "max_num_seqs": case.seqs, "max_num_batched_tokens": case.tokens}
    own = {
        "release": release, "use_v2_model_runner": v2, "blackwell": case.blackwell, "cudagraph_mode": case.mode,
        "num_speculative_tokens": case.drafts, "performance_mode": case.performance,
        "tensor_parallel_size": case.devices, "enable_sp": case.sequence_parallel,
        "max_cudagraph_capture_size": case.largest,
    }  # fmt: skip
    return Setup(VLLM.limits(limits), complete(VLLM.settings, own))


def of_llmc(case: Case, built: Setup) -> list[int] | None:
    try:
        if case.given is None:
            return [size for (size,) in VLLM.default(built)["tokens"]] or None
        lists = {"tokens": tuple((size,) for size in sorted(case.given))}
        return [size for (size,) in VLLM.accept(built, lists).lists["tokens"]]
    except InputError:
        return None


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("root", releases("vllm"), ids=lambda path: path.name)
def test_sizes(root: Path, v2: bool) -> None:
    release = root.name.rpartition("-")[2]
    parts = tuple(map(int, release.split(".")))
    random_ = random.Random(release)
    differ = []
    for _ in range(CASES):
        case = draw(random_, with_sp=parts < (0, 32))
        theirs, ours = of_vllm(root, case, v2), of_llmc(case, setup(case, release, v2))
        if theirs != ours:
            differ.append((case, theirs, ours))
    assert not differ, f"{len(differ)} of {CASES}; the first: {differ[0]}"


def graphs_of_vllm(root: Path, case: Case, sizes: list[int]) -> dict[Mode, list[int]]:
    """What Model Runner V2 captures for `sizes`: the tokens of its graphs by mode."""
    tree = source(root, "vllm/v1/worker/gpu/cudagraph_utils.py")
    space = {
        "CUDAGraphMode": Mode, "BatchExecutionDescriptor": _Descriptor, "defaultdict": defaultdict, "groupby": groupby,
        "product": product, "round_up": round_up, "replace": None,
    }  # fmt: skip
    this = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]),
        cudagraph_mode=Mode[case.mode], max_num_reqs=case.seqs, decode_query_len=1 + case.drafts, varlen_decode=False,
        lora_capture_cases=[0], _candidates={}, _capture_descs={}, _maybe_ubatch_twin=lambda desc: None,
        vllm_config=SimpleNamespace(speculative_config=None, cache_config=SimpleNamespace(use_kda_recoverssm=False)),
    )  # fmt: skip
    run: Callable[..., Any] = extract(tree, "_init_candidates", space)
    run(this)
    return {mode: sorted(desc.num_tokens for desc in descs) for mode, descs in this._capture_descs.items()}


@dataclass(frozen=True)
class _Descriptor:
    """BatchExecutionDescriptor, as far as a list of sizes decides it."""

    cg_mode: Mode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None
    max_query_len: int | None = None
    num_active_loras: int = 0


@pytest.mark.parametrize("root", releases("vllm"), ids=lambda path: path.name)
def test_graphs_of_model_runner_v2(root: Path) -> None:
    release = root.name.rpartition("-")[2]
    if tuple(map(int, release.split("."))) < (0, 28):
        pytest.skip("its Model Runner V2 has no such function")
    random_ = random.Random(release)
    for _ in range(CASES):
        case = draw(random_, with_sp=False)
        sizes = of_vllm(root, case, True)
        if sizes:
            graphs = sum(map(len, graphs_of_vllm(root, case, sizes).values()))
            built = setup(case, release, True)
            assert VLLM.graphs(built, {"tokens": tuple((size,) for size in sizes)}) == graphs, (case, sizes)
