"""Batches and tokens of SGLang's graphs by its own functions, and by llmc's rules."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.integrations import bucket_rules
from llmc.integrations.base import Setup
from llmc.integrations.settings import complete
from tests.oracles.conftest import releases
from tests.oracles.sources import extract, source

pytestmark = pytest.mark.oracle
SGLANG = bucket_rules("sglang")
CASES = 500
HOOKS = "sglang/srt/arg_groups/"


def lists_of_sglang(root: Path, built: Setup, given: list[int] | None) -> tuple[list[int], list[int]]:
    """What SGLang captures for decode steps and for prompts: memory_hook.py, then base_cuda_graph_runner.py."""
    own, limits = built.own, built.limits
    phases = SimpleNamespace(
        decode=SimpleNamespace(backend="full", max_bs=own["cuda_graph_max_bs_decode"], bs=given),
        prefill=SimpleNamespace(backend="breakable", max_bs=own["cuda_graph_max_bs_prefill"], bs=None),
    )
    arguments = SimpleNamespace(
        cuda_graph_config=phases, device="cuda", chunked_prefill_size=limits.max_num_batched_tokens,
        tp_size=own["tp_size"], pp_size=1, max_running_requests=limits.max_num_seqs, max_total_tokens=None,
        model_path="m", mem_fraction_static=0.9, enable_symm_mem=False, _cuda_graph_config_locked=set(),
        disable_cuda_graph_padding=own["disable_cuda_graph_padding"],
        speculative_algorithm="EAGLE" if own["speculative_num_draft_tokens"] else None,
    )  # fmt: skip
    known: dict[str, Any] = {"resolving_view": lambda given: given}
    hook = source(root, HOOKS + "cuda_graph_hook.py")
    for name in ("decode", "prefill"):
        known[name] = extract(hook, f"generate_{name}_cuda_graph_batch_sizes", known)
    memory = {
        "copy": copy, "resolving_view": lambda given: given, "use_mla_backend": lambda given: False,
        "get_device_memory_capacity": lambda device: built.number("gpu_memory_gib") * 1024,
        "generate_decode_cuda_graph_batch_sizes": known["decode"],
        "generate_prefill_cuda_graph_batch_sizes": known["prefill"],
        "expand_multimodal_decode_graph_to_running_limit": lambda *given: None,
        "declare_resolution": lambda args, why, **values: vars(args).update(values),
        "Backend": SimpleNamespace(BREAKABLE="breakable"), "Phase": SimpleNamespace(PREFILL="prefill"),
    }  # fmt: skip
    extract(source(root, HOOKS + "memory_hook.py"), "handle_gpu_memory_settings", memory)(arguments)
    overlap = own["enable_two_batch_overlap"]
    phases = arguments.cuda_graph_config
    execution = SimpleNamespace(
        graph=SimpleNamespace(cuda_graph_config=phases, torch_compile_max_bs=0),
        overlap=SimpleNamespace(enable_two_batch_overlap=overlap),
    )
    runner = {
        "get_exec": lambda: execution, "get_cuda_graph_batch_size_alignment": lambda **given: 2 if overlap else 1,
        "DllmConfig": SimpleNamespace(from_server_args=lambda given: None), "ceil_align": lambda x, n: -(-x // n) * n,
        "get_flags": lambda: SimpleNamespace(capture=SimpleNamespace(enable_torch_compile=False)),
    }  # fmt: skip
    capture = extract(
        source(root, "sglang/srt/model_executor/runner/base_cuda_graph_runner.py"), "get_batch_sizes_to_capture", runner
    )
    model = SimpleNamespace(req_to_token_pool=SimpleNamespace(size=limits.max_num_seqs), server_args=arguments)
    return capture(model)[0], [] if overlap else phases.prefill.bs


@pytest.mark.parametrize("root", releases("sglang"), ids=lambda path: path.name)
def test_its_own_lists_and_lists_that_it_is_given(root: Path) -> None:
    random_ = random.Random(root.name)
    for _ in range(CASES):
        seqs = random_.choice([random_.randint(2, 2048), 16, 256])
        tokens = max(seqs, random_.choice([random_.randint(64, 20000), 8192]))
        limits = {"max_model_len": 8192, "max_num_seqs": seqs, "max_num_batched_tokens": tokens}
        own = {
            "gpu_memory_gib": random_.choice([16, 24, 40, 80, 141, 192]), "tp_size": random_.choice([1, 2, 4, 8]),
            "cuda_graph_max_bs_decode": random_.choice([None, None, random_.randint(2, 800)]),
            "cuda_graph_max_bs_prefill": random_.choice([None, random_.randint(4, 9000)]),
            "speculative_num_draft_tokens": random_.choice([0, 0, 3]),
            "disable_cuda_graph_padding": random_.random() < 0.2, "enable_two_batch_overlap": random_.random() < 0.2,
        }  # fmt: skip
        built = Setup(SGLANG.limits(limits), complete(SGLANG.settings, own))
        decode, prefill = lists_of_sglang(root, built, None)
        lists = SGLANG.default(built)
        assert [size for (size,) in lists["decode"]] == decode, built
        assert [size for (size,) in lists["prefill"]] == prefill, built
        given = sorted(random_.sample(range(1, 600), random_.randint(1, 30)))
        if any(size % 2 == 0 and size <= limits["max_num_seqs"] for size in given):
            decode, _ = lists_of_sglang(root, built, given)
            named = {"decode": tuple((size,) for size in given), "prefill": lists["prefill"] or ((4,),)}
            assert [size for (size,) in SGLANG.accept(built, named).lists["decode"]] == decode, (built, given)
