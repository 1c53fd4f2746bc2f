"""Token and request paddings by tpu-inference's own functions, and by llmc's rules."""

from __future__ import annotations

import bisect
import json
import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import Setup
from llmc.integrations.settings import complete
from tests.oracles.conftest import releases
from tests.oracles.sources import extract, source

pytestmark = pytest.mark.oracle
TPU = bucket_rules("tpu-inference")
CASES = 500
UTILS = "tpu_inference/runner/utils.py"
PACKING = {"auto": 2, "bfloat16": 2, "fp8": 4, "fp8_e4m3": 4, "float32": 1}


def functions(root: Path, bucketized: bool, custom: list[int]) -> dict[str, Any]:
    """The functions of the runner that make lists, which call one another."""
    tree = source(root, UTILS)
    known: dict[str, Any] = {
        "logger": logging.getLogger("tpu"), "MIN_NUM_SEQS": 8, "bisect": bisect,
        "envs": SimpleNamespace(ATTN_BUCKETIZED_NUM_REQS=bucketized, ATTN_CUSTOM_NUM_REQS_BUCKETS=custom),
    }  # fmt: skip
    for name in (
        "get_padded_num_reqs_with_upper_limit", "get_req_paddings", "get_attn_req_paddings", "get_token_paddings",
        "build_token_paddings", "get_padded_token_len",
    ):  # fmt: skip
        try:
            known[name] = extract(tree, name, known)
        except KeyError:
            assert name == "build_token_paddings"
    return known


def tokens_of(known: dict[str, Any], built: Setup, least: int, gap: int, sizes: list[int]) -> list[int]:
    """num_tokens_paddings, as the runner's _init_inputs makes them."""
    ranks = 1 if built.own["multiprocess_dp"] else built.number("data_parallel_size")
    floor = 1 << (ranks * PACKING[str(built.own["kv_cache_dtype"])] - 1).bit_length()
    least, most = max(least, floor), built.limits.max_num_batched_tokens * ranks
    if "build_token_paddings" in known:
        return list(known["build_token_paddings"](least, most, gap, sizes))
    return sorted(known["get_token_paddings"](least, most, gap) + sizes)


def draw(random_: random.Random, release: str) -> Setup:
    seqs = random_.choice([random_.randint(8, 512), 8, 64, 256])
    tokens = max(seqs, random_.choice([random_.randint(8, 20000), 2048, 8192, 16640]))
    limits = {"max_model_len": 8192, "max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    own = {
        "release": release, "data_parallel_size": random_.choice([1, 1, 2, 4]),
        "multiprocess_dp": random_.random() < 0.5, "kv_cache_dtype": random_.choice(list(PACKING)),
        "min_token_bucket": random_.choice([16, 16, 32, 128, 1024]),
        "padding_gap": random_.choice([0, 0, 64, 256, 100]),
        "bucketized_requests": random_.random() < 0.5,
    }  # fmt: skip
    return Setup(TPU.limits(limits), complete(TPU.settings, own))


@pytest.mark.parametrize("root", releases("tpu-inference"), ids=lambda path: path.name)
def test_its_own_lists(root: Path) -> None:
    release = root.name.rpartition("-")[2]
    random_ = random.Random(release)
    for _ in range(CASES):
        built = draw(random_, release)
        known = functions(root, bool(built.own["bucketized_requests"]), [])
        theirs = tokens_of(known, built, built.number("min_token_bucket"), built.number("padding_gap"), [])
        requests = known["get_attn_req_paddings"](8, built.limits.max_num_seqs)
        try:
            lists = TPU.default(built)
        except InputError:
            assert not theirs, built
            continue
        assert [size for (size,) in lists["tokens"]] == theirs, built
        assert [count for (count,) in lists["requests"]] == requests, built


@pytest.mark.parametrize("root", releases("tpu-inference"), ids=lambda path: path.name)
def test_what_is_written_is_what_the_server_makes_of_it(root: Path) -> None:
    release = root.name.rpartition("-")[2]
    random_ = random.Random(release)
    for _ in range(CASES):
        built = draw(random_, release)
        ranks = built.number("data_parallel_size")
        most = built.limits.max_num_batched_tokens
        chosen = {
            "tokens": tuple((n * ranks,) for n in sorted(random_.sample(range(1, most + 1), min(most, 12)))),
            "requests": tuple((n,) for n in sorted(random_.sample(range(1, built.limits.max_num_seqs + 1), 3))),
        }
        lists = TPU.accept(built, chosen).lists
        written = TPU.export(built, lists)
        environment = written.environment
        (config,) = [json.loads(one.partition(" ")[2]) for one in written.arguments if one.startswith("--additional")]
        known = functions(
            root, environment["ATTN_BUCKETIZED_NUM_REQS"] == "1",
            [int(n) for n in environment.get("ATTN_CUSTOM_NUM_REQS_BUCKETS", "").split(",") if n],
        )  # fmt: skip
        theirs = tokens_of(
            known, built, int(environment["MIN_TOKEN_BUCKET"]), int(environment["VLLM_TPU_BUCKET_PADDING_GAP"]),
            config["compilation_sizes"],
        )  # fmt: skip
        assert [size for (size,) in lists["tokens"]] == theirs, (built, written)
        assert [n for (n,) in lists["requests"]] == known["get_attn_req_paddings"](8, built.limits.max_num_seqs), built
        for step in random_.sample(range(1, theirs[-1] + 1), min(10, theirs[-1])):
            found = TPU.finder(built, "tokens", lists["tokens"]).find((step,))
            assert found.shape[0] == known["get_padded_token_len"](theirs, step)
