"""NxD Inference's buckets: whole prompts, and contexts of steps that compute max_num_seqs rows."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.planner.planner import make_plan
from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import Export, Pick, Setup
from llmc.integrations.settings import Value
from tests.integrations import judging
from tests.integrations.judging import shapes, values
from tests.tiers import full

NXD = bucket_rules("nxd")


def setup(length: int = 2048, seqs: int = 4, **own: Value) -> Setup:
    return judging.setup(NXD, {"max_model_len": length, "max_num_seqs": seqs}, own)


@pytest.mark.parametrize(
    ("length", "buckets"),
    [
        (2048, [128, 256, 512, 1024, 2048]),
        (513, [128, 256, 513]),
        (510, [128, 256, 510]),
        (750, [128, 256, 512, 750]),
        (128, [128]),
        (100, [100]),
        (129, [129]),
    ],
)
def test_its_own_lists(length: int, buckets: list[int]) -> None:
    found = NXD.default(setup(length))
    assert values(found["context_encoding"]) == values(found["token_generation"]) == buckets


def test_without_bucketing_there_is_one_graph_of_each() -> None:
    built = setup(enable_bucketing=False)
    assert NXD.default(built) == {"context_encoding": shapes(2048), "token_generation": shapes(2048)}
    assert NXD.graphs(built, NXD.default(built)) == 2
    off = Export(arguments=('--override-neuron-config {"enable_bucketing": false}',))
    assert NXD.read(off, setup()) == NXD.default(built)


def test_prompts_are_prefilled_whole() -> None:
    limits = setup().limits
    assert (limits.max_num_batched_tokens, limits.block_size) == (2048, 2048)
    with pytest.raises(InputError, match="max_num_batched_tokens 512 is below max_model_len 2048"):
        NXD.limits({"max_model_len": 2048, "max_num_batched_tokens": 512})


def test_a_decode_step_counts_its_longest_context_and_all_its_tokens() -> None:
    assert judging.steps(NXD, setup(2048, 2), (0.0, 100, 3), (0.0, 40, 2)) == [
        ("context_encoding", 100, 1, 100), ("context_encoding", 40, 1, 40),
        ("token_generation", 101, 1, 142), ("token_generation", 102, 1, 102),
    ]  # fmt: skip
    assert NXD.work(setup(2048, 4), "token_generation", (128,)) == 512
    assert NXD.work(setup(2048, 4), "context_encoding", (128,)) == 128


def test_the_least_bucket_that_covers_is_taken_and_a_longer_input_fails() -> None:
    finder = NXD.finder(setup(), "context_encoding", shapes(128, 512))
    assert [finder.find((n,)) for n in (128, 129, 513)] == [
        Pick((128,)),
        Pick((512,)),
        Pick((513,), "error"),
    ]


@pytest.mark.parametrize(
    ("lists", "match"),
    [
        ({"context_encoding": shapes(4096), "token_generation": shapes(2048)}, "4096 is above max_model_len 2048"),
        ({"context_encoding": shapes(2048), "token_generation": ()}, "token_generation_buckets is empty"),
    ],
)
def test_lists_that_it_refuses(lists: dict[str, tuple[tuple[int, ...], ...]], match: str) -> None:
    with pytest.raises(InputError, match=match):
        NXD.accept(setup(), lists)


@full
@given(st.sets(st.integers(1, 2048), min_size=1, max_size=12), st.sets(st.integers(1, 2048), min_size=1, max_size=12))
def test_what_is_written_is_read(encoding: set[int], generation: set[int]) -> None:
    lists = {"context_encoding": shapes(*sorted(encoding)), "token_generation": shapes(*sorted(generation))}
    written = judging.written_is_read(NXD, setup(), lists)
    assert json.loads(written.files["config.json"])["context_encoding_buckets"] == sorted(encoding)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"context_encoding_buckets": [128, 4096]}', "4096 is above max_model_len"),
        ('{"context_encoding_buckets": "128"}', "must be a list of whole numbers"),
        ('{"enable_bucketing": false, "context_encoding_buckets": [128]}', "set it to true"),
        ('{"enable_bucketing": 1}', "enable_bucketing must be true or false"),
        ("[]", "must be a JSON object"),
    ],
)
def test_a_configuration_that_it_refuses_is_an_error(text: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        NXD.read(Export(arguments=(f"--override-neuron-config {text}",)), setup())


def test_a_list_is_read_in_any_order_and_the_other_stays_its_own() -> None:
    text = '--override-neuron-config {"context_encoding_buckets": [2048, 128]}'
    found = NXD.read(Export(arguments=(text,)), setup())
    assert found["context_encoding"] == shapes(128, 2048)
    assert found["token_generation"] == NXD.default(setup())["token_generation"]


def test_the_arguments_in_the_log_have_the_lists() -> None:
    config = "{'context_encoding_buckets': [128, 512], 'token_generation_buckets': [512]}"
    text = f"args: Namespace(override_neuron_config={config})"
    assert NXD.read_log(["INFO", text]) == {"context_encoding": shapes(128, 512), "token_generation": shapes(512)}
    assert NXD.read_log(["args: Namespace(override_neuron_config=None)"]) is None


@given(st.dictionaries(st.integers(1, 1024), st.integers(1, 9), min_size=1, max_size=10), st.integers(1, 4))
def test_a_proposal_pads_no_more_than_any_other(counts: dict[int, int], most: int) -> None:
    built = setup(1024)
    demands = {family: judging.counted(family, counts) for family in ("context_encoding", "token_generation")}
    chosen = NXD.propose(built, demands, dict.fromkeys(demands, most))
    assert NXD.accept(built, chosen).lists == chosen
    for family, steps in demands.items():
        work = judging.padded(NXD, built, steps, chosen[family])
        assert len(chosen[family]) <= most
        assert work == judging.best(NXD, built, steps, range(128, 1025, 128), most)


def test_a_plan_becomes_buckets() -> None:
    built = setup(1024)
    lists = NXD.from_plan(built, make_plan(built.limits))
    assert NXD.accept(built, lists).lists == lists
