"""Buckets, filters and look-ups by vllm-gaudi's own bucketing manager, and by llmc's rules.

vllm-gaudi is on no index: LLMC_VLLM_GAUDI names a checkout.
"""

from __future__ import annotations

import importlib
import logging
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import Setup
from llmc.integrations.settings import complete

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif("LLMC_VLLM_GAUDI" not in os.environ, reason="LLMC_VLLM_GAUDI names no checkout of vllm-gaudi"),
]
GAUDI = bucket_rules("vllm-gaudi")
CASES, LOOKUPS = 500, 10


class Config(SimpleNamespace):
    """get_config() of the plug-in: what is not set is None."""

    def __getattr__(self, name: str) -> Any:
        return None


@pytest.fixture
def managers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Config]]:
    """The manager's class, and the configuration that it reads."""
    root = Path(os.environ["LLMC_VLLM_GAUDI"]) / "vllm_gaudi"
    config = Config()
    for name, path, attributes in (
        ("vllm_gaudi", root, {}),
        ("vllm_gaudi.extension", root / "extension", {}),
        ("vllm_gaudi.extension.logger", None, {"logger": lambda: logging.getLogger("vllm_gaudi")}),
        ("vllm_gaudi.extension.runtime", None, {"get_config": lambda: config}),
        ("vllm_gaudi.extension.config", None, {"boolean": bool}),
    ):
        module = ModuleType(name)
        vars(module).update(attributes)
        if path is not None:
            module.__path__ = [str(path)]
        monkeypatch.setitem(sys.modules, name, module)
    logging.getLogger("vllm_gaudi").setLevel(logging.CRITICAL)
    common = importlib.import_module("vllm_gaudi.extension.bucketing.common")
    yield common.HPUBucketingManager, config
    for name in [name for name in sys.modules if name.startswith("vllm_gaudi.extension.bucketing")]:
        del sys.modules[name]


def draw(random_: random.Random) -> Setup:
    block = random_.choice([128, 128, 256])
    length = block * random_.randint(2, 200) - random_.choice([0, 0, 5])
    seqs = random_.choice([random_.randint(1, 300), 16, 32, 128])
    tokens = max(seqs, block * random_.randint(2, 40))
    own = {
        "contiguous_pa": random_.random() < 0.5, "prompt_bs_max": random_.choice([None, 1, 4]),
        "num_hpu_blocks": random_.randint(max(seqs, 10), 40 * seqs + 200),
        "num_speculative_tokens": random_.choice([0, 0, 2]),
        "unbounded_decode_blocks": random_.random() < 0.2, "mamba_chunk_size": random_.choice([0, 0, block]),
        "mamba_chunk_size_is_explicit": random_.random() < 0.5,
    }  # fmt: skip
    limits = {"max_model_len": length, "max_num_seqs": seqs, "max_num_batched_tokens": tokens, "block_size": block}
    return Setup(GAUDI.limits(limits), complete(GAUDI.settings, own))


def said(built: Setup) -> str:
    """What was drawn."""
    return f"{built.limits} { {name: value for name, value in built.own.items() if value is not None} }"


def manager_of(kind: Any, config: Config, built: Setup) -> Any:
    limits, own = built.limits, built.own
    vars(config).clear()
    vars(config).update(
        use_contiguous_pa=own["contiguous_pa"],
        merged_prefill=False,
        VLLM_BUCKETING_STRATEGY="exp",
        bucketing_strategy="exp",
    )
    found = kind()
    found.initialize(
        limits.max_num_seqs, own["prompt_bs_max"] or 1, limits.block_size, limits.max_num_batched_tokens,
        limits.max_model_len, own["num_speculative_tokens"], own["mamba_chunk_size"],
        own["mamba_chunk_size_is_explicit"],
    )  # fmt: skip
    found.num_hpu_blocks = own["num_hpu_blocks"]
    found.skip_decode_block_clamp = own["unbounded_decode_blocks"]
    found.generate_prompt_buckets()
    found.generate_decode_buckets()
    return found


def test_generated_buckets_and_look_ups(managers: tuple[Any, Config]) -> None:
    random_, compared = random.Random(1), 0
    differ: list[tuple[str, Any, Any]] = []
    for _ in range(CASES):
        built = draw(random_)
        try:
            manager = manager_of(*managers, built)
        except (RuntimeError, ValueError, AssertionError):
            continue  # the server ends at start
        compared += 1
        try:
            lists = GAUDI.default(built)
        except InputError as error:
            differ.append((said(built), str(error), ""))
            continue
        for family, theirs in (("prompt", manager.prompt_buckets), ("decode", manager.decode_buckets)):
            if list(lists[family]) != sorted(set(theirs)):
                extra, missing = set(lists[family]) - set(theirs), set(theirs) - set(lists[family])
                differ.append((said(built), sorted(extra)[:4], sorted(missing)[:4]))
        finders = {family: GAUDI.finder(built, family, lists[family]) for family in ("prompt", "decode")}
        for _ in range(LOOKUPS):
            rows, query = (
                random_.randint(1, built.limits.max_num_seqs),
                random_.randint(1, built.limits.max_num_batched_tokens),
            )
            context = random_.randint(0, -(-(built.limits.max_model_len - 1) // built.limits.block_size))
            theirs = manager.find_prompt_bucket(1, query, context)
            ours = finders["prompt"].find((1, query, context)).shape
            if theirs != ours:
                differ.append((said(built), (1, query, context), (ours, theirs)))
            blocks = random_.randint(rows, built.number("num_hpu_blocks"))
            theirs, ours = manager.find_decode_bucket(rows, blocks), finders["decode"].find((rows, 1, blocks)).shape
            if theirs != ours:
                differ.append((said(built), (rows, 1, blocks), (ours, theirs)))
    assert compared >= CASES * 0.7
    assert not differ, f"{len(differ)}; " + "\n".join(map(str, differ[:3]))
