"""Decode batches and graphs of vllm-rbln and of optimum-rbln by their own classes, and by llmc's rules."""

from __future__ import annotations

import json
import logging
import random
from abc import ABC, abstractmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import Lists, Pick, Setup
from llmc.integrations.settings import complete
from tests.oracles.conftest import releases
from tests.oracles.sources import extract, extract_class, source

pytestmark = pytest.mark.oracle
RBLN = bucket_rules("optimum-rbln")
CASES, LOOKUPS = 500, 5000
BUCKETING = "vllm_rbln/v1/worker/bucketing/"
CONFIGURATION = "optimum/rbln/transformers/models/decoderonly/configuration_decoderonly.py"


def manager(root: Path, built: Setup, manual: list[int]) -> Any:
    """The bucketing manager that vllm-rbln makes: v1/worker/rbln_model_runner.py."""
    known: dict[str, Any] = {"ABC": ABC, "abstractmethod": abstractmethod}
    for file, name in (
        ("bucketing", "RBLNBucketing"), ("exponential_bucketing", "ExponentialBucketing"),
        ("linear_bucketing", "LinearBucketing"), ("manual_bucketing", "ManualBucketing"),
    ):  # fmt: skip
        known[f"{name}Manager"] = extract_class(source(root, f"{BUCKETING}{file}_manager.py"), f"{name}Manager", known)
    batch = extract(source(root, "vllm_rbln/v1/core/utils.py"), "decode_batch_size", {})
    return extract(source(root, BUCKETING + "__init__.py"), "get_bucketing_manager", known)(
        "manual" if manual else built.own["decode_batch_bucket_strategy"],
        max_batch_size=batch(built.limits.max_num_seqs, built.own["pipeline_parallel_size"]),
        min_batch_size=built.own["decode_batch_bucket_min"],
        step=built.own["decode_batch_bucket_step"],
        limit=built.own["decode_batch_bucket_limit"],
        manual_buckets=manual,
    )


def graphs(root: Path, built: Setup, buckets: Any) -> int:
    """The graphs that vllm-rbln runs at start."""
    tree = source(root, "vllm_rbln/v1/worker/rbln_model_runner.py")
    drafts, method = built.own["num_speculative_tokens"], built.own["speculative_method"]
    speculative = SimpleNamespace(num_speculative_tokens=drafts, method=method) if drafts else None
    runner = SimpleNamespace(
        speculative_config=speculative, bucketing_manager=buckets, max_num_tokens=128, specialized_moe_decode=False
    )
    runner.uses_fixed_decode_window = extract(tree, "uses_fixed_decode_window", {})(runner)
    ran: list[tuple[int, int, bool]] = []
    runner._dummy_run = lambda *shape: ran.append(shape)
    extract(tree, "run_model_graphs", {})(runner)
    return len(set(ran))


def setups(random_: random.Random) -> Setup:
    own = {
        "decode_batch_bucket_strategy": random_.choice(["exponential", "linear"]),
        "decode_batch_bucket_min": random_.choice([1, 1, random_.randint(1, 20)]),
        "decode_batch_bucket_step": random_.choice([1, 2, 2, 3, 16]),
        "decode_batch_bucket_limit": random_.choice([1, 4, 99]),
        "pipeline_parallel_size": random_.choice([1, 1, 2, 4]),
        "num_speculative_tokens": random_.choice([0, 0, 3]),
        "speculative_method": random_.choice(["ngram", "medusa", "eagle3", "mtp"]),
    }
    limits = {"max_model_len": 8192, "max_num_seqs": random_.randint(4, 300)}
    return Setup(RBLN.limits(limits), complete(RBLN.settings, own))


def sizes(lists: Lists) -> list[int]:
    return [size for (size,) in lists["decode"]]


@pytest.mark.parametrize("root", releases("vllm-rbln"), ids=lambda path: path.name)
def test_lists_look_ups_and_graphs_of_vllm_rbln(root: Path) -> None:
    random_ = random.Random(root.name)
    refused = 0
    for _ in range(CASES):
        built = setups(random_)
        try:
            expected = manager(root, built, [])
        except ValueError:
            refused += 1
            with pytest.raises(InputError):
                RBLN.default(built)
            continue
        lists = RBLN.default(built)
        assert sizes(lists) == expected.decode_batch_buckets, built
        assert RBLN.graphs(built, lists) == graphs(root, built, expected), built
        top = expected.max_batch_size
        given = sorted({*random_.sample(range(1, 300), random_.randint(1, 20)), random_.choice([top, top + 1])})
        try:
            manual = manager(root, built, given)
        except ValueError:
            refused += 1
            with pytest.raises(InputError):
                RBLN.accept(built, {"decode": tuple((size,) for size in given)})
            continue
        accepted = RBLN.accept(built, {"decode": tuple((size,) for size in given)}).lists
        assert sizes(accepted) == manual.decode_batch_buckets, built
        finder = RBLN.finder(built, "decode", accepted["decode"])
        for _ in range(LOOKUPS // CASES):
            batch = random_.randint(1, top)
            assert finder.find((batch,)) == Pick((manual.find_decode_batch_bucket(batch),)), (built, given)
    assert 0 < refused < CASES


class _Base:
    """In place of optimum-rbln's RBLNModelConfig, whose settings the batches do not depend on."""


@pytest.mark.parametrize("root", releases("optimum-rbln"), ids=lambda path: path.name)
def test_optimum_rbln_compiles_the_batches_that_are_written(root: Path) -> None:
    tree = source(root, CONFIGURATION)
    known = {"RBLNModelConfig": _Base, "deprecate_kwarg": lambda **_: lambda method: method}
    known |= {"logger": logging.getLogger(__name__), "get_args": lambda _: ("prefill", "decode"), "PhaseType": None}
    known["RBLNDecoderOnlyModelConfig"] = extract_class(tree, "RBLNDecoderOnlyModelConfig", known)
    configuration = extract_class(tree, "RBLNDecoderOnlyModelForCausalLMConfig", known)
    random_ = random.Random(root.name)
    for _ in range(CASES):
        built = setups(random_)
        top = built.limits.max_num_seqs // built.number("pipeline_parallel_size")
        given = sorted({*random_.sample(range(1, top + 1), random_.randint(1, min(top, 20))), top})
        accepted = RBLN.accept(built, {"decode": tuple((size,) for size in given)}).lists
        written = json.loads(RBLN.export(built, accepted).files["config.json"])
        compiled = configuration(**written)
        assert compiled.decoder_batch_sizes == sizes(accepted)[::-1]
        assert (compiled.batch_size, compiled.max_seq_len) == (top, 8192)
        assert len(compiled.expected_compiled_model_names) == 1 + len(given)
