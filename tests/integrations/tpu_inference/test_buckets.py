"""tpu-inference's paddings: those it generates, a list of one's own among them, and data-parallel ranks."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llmc.buckets.planner.planner import make_plan
from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import Export, Pick, Setup
from llmc.integrations.settings import Value, from_flags
from tests.integrations import judging
from tests.integrations.judging import shapes, values
from tests.tiers import full

TPU = bucket_rules("tpu-inference")


def setup(max_num_batched_tokens: int = 2048, max_num_seqs: int = 256, **own: Value) -> Setup:
    limits = {
        "max_model_len": 8192, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens,
    }  # fmt: skip
    return judging.setup(TPU, limits, own)


@pytest.mark.parametrize(
    ("built", "tokens"),
    [
        (setup(2048), [16, 32, 64, 128, 256, 512, 1024, 2048]),
        (setup(1500), [16, 32, 64, 128, 256, 512, 1024, 1504]),
        (setup(1500, release="0.29"), [16, 32, 64, 128, 256, 512, 1024, 2048]),
        (setup(2048, min_token_bucket=2048), [2048]),
        (setup(1024, padding_gap=256), [16, 32, 64, 128, 256, 512, 768, 1024]),
        (setup(1024, padding_gap=100), [16, 32, 64, 164, 264, 364, 464, 564, 664, 764, 864, 964, 1024]),
        (setup(1024, release="0.29", min_token_bucket=512, padding_gap=400), [656, 1056]),
        (setup(900, min_token_bucket=1024, padding_gap=388), [900, 1024]),
        (setup(900, release="0.29", min_token_bucket=1024, padding_gap=388), [900]),
        (setup(256, data_parallel_size=16), [16, 32, 64, 128, 256]),
        (setup(256, data_parallel_size=16, multiprocess_dp=False), [32, 64, 128, 256, 512, 1024, 2048, 4096]),
        (
            setup(256, data_parallel_size=16, multiprocess_dp=False, kv_cache_dtype="fp8"),
            [64, 128, 256, 512, 1024, 2048, 4096],
        ),
    ],
)
def test_its_own_tokens(built: Setup, tokens: list[int]) -> None:
    assert values(TPU.default(built)["tokens"]) == tokens


@pytest.mark.parametrize(
    ("seqs", "bucketized", "requests"),
    [(256, False, [256]), (100, True, [8, 16, 32, 64, 100]), (8, True, [8]), (12, True, [8, 12]), (4, True, [4])],
)
def test_its_own_requests(seqs: int, bucketized: bool, requests: list[int]) -> None:
    assert values(TPU.default(setup(2048, seqs, bucketized_requests=bucketized))["requests"]) == requests


def test_a_least_size_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(InputError, match="MIN_TOKEN_BUCKET 48 must be a power of two; use 64"):
        TPU.default(setup(min_token_bucket=48))


def test_what_covers_every_step_is_added() -> None:
    accepted = TPU.accept(setup(2000, 64), {"tokens": shapes(96, 512), "requests": shapes(8)})
    assert accepted.lists == {"tokens": shapes(96, 512, 2000, 2048), "requests": shapes(8, 64)}
    assert set(accepted.added) == {("tokens", (2000,)), ("tokens", (2048,)), ("requests", (64,))}
    before = TPU.accept(setup(2000, 64, release="0.29"), {"tokens": shapes(96, 512), "requests": shapes(8)})
    assert before.lists["tokens"] == shapes(96, 512, 2000)


def test_sizes_that_ranks_cannot_share_and_requests_above_the_most_are_refused() -> None:
    with pytest.raises(InputError, match=r"compilation_sizes 97 is not a multiple of 4.*use 100"):
        TPU.accept(setup(data_parallel_size=4, multiprocess_dp=False), {"tokens": shapes(97), "requests": shapes(256)})
    with pytest.raises(InputError, match="300 is above max_num_seqs 256"):
        TPU.accept(setup(), {"tokens": shapes(2048), "requests": shapes(8, 300)})


def test_the_next_size_above_is_taken_and_a_larger_step_fails() -> None:
    finder = TPU.finder(setup(), "tokens", shapes(16, 96))
    assert [finder.find((n,)) for n in (1, 16, 17, 97)] == [
        Pick((16,)), Pick((16,)), Pick((96,)), Pick((97,), "error"),
    ]  # fmt: skip


def test_a_step_counts_its_tokens_and_its_requests() -> None:
    found = judging.steps(TPU, setup(64, 8), (0.0, 100, 3), (0.0, 10, 2))
    assert found == [
        ("tokens", 64, 1, 64), ("requests", 1, 1, 1),
        ("tokens", 46, 1, 46), ("requests", 2, 1, 2),
        ("tokens", 2, 1, 2), ("requests", 2, 1, 2),
        ("tokens", 1, 1, 1), ("requests", 1, 1, 1),
    ]  # fmt: skip


def test_the_fullest_rank_decides_for_all_of_them() -> None:
    found = judging.steps(
        TPU, setup(64, data_parallel_size=4, multiprocess_dp=False, max_num_seqs=8), (0.0, 50, 2), (0.0, 30, 1)
    )
    assert found[:2] == [("tokens", 200, 1, 80), ("requests", 1, 1, 2)]
    assert TPU.work(setup(data_parallel_size=4, multiprocess_dp=False), "requests", (8,)) == 32


def test_ranks_of_their_own_processes_pad_alone() -> None:
    found = judging.steps(TPU, setup(64, data_parallel_size=2, max_num_seqs=8), (0.0, 50, 1), (0.0, 30, 1))
    assert found == [("tokens", 50, 1, 50), ("requests", 1, 1, 1)]
    assert TPU.work(setup(data_parallel_size=2), "requests", (8,)) == 8


def test_drafts_are_tokens_of_the_step() -> None:
    assert judging.steps(TPU, setup(num_speculative_tokens=3), (0.0, 10, 2))[2] == ("tokens", 4, 1, 4)


def test_graphs_are_tokens_times_requests() -> None:
    assert TPU.graphs(setup(), {"tokens": shapes(16, 32, 64), "requests": shapes(8, 256)}) == 6


@given(
    st.sets(st.integers(1, 300), max_size=12),
    st.sets(st.integers(1, 64), max_size=5),
    st.integers(1, 2500),
    st.sampled_from([1, 3, 4, 16]),
    st.sampled_from(["auto", "fp8"]),
)
def test_what_is_written_is_read(tokens: set[int], requests: set[int], most: int, ranks: int, kind: str) -> None:
    built = setup(max(most, 64), 64, data_parallel_size=ranks, multiprocess_dp=False, kv_cache_dtype=kind)
    given_lists = {"tokens": shapes(*sorted(n * ranks for n in tokens)), "requests": shapes(*sorted(requests))}
    lists = TPU.accept(built, given_lists).lists
    assert TPU.accept(built, lists).lists == lists
    written = judging.written_is_read(TPU, built, lists)
    environment = written.environment
    generated = setup(
        max(most, 64), 64, data_parallel_size=ranks, multiprocess_dp=False, kv_cache_dtype=kind,
        min_token_bucket=int(environment["MIN_TOKEN_BUCKET"]),
        padding_gap=int(environment["VLLM_TPU_BUCKET_PADDING_GAP"]),
    )  # fmt: skip
    assert len(TPU.default(generated)["tokens"]) <= 2, "the server generates as few as it can; the others are given"


@full
@given(st.integers(1, 9000), st.sampled_from([1, 2, 16]), st.integers(0, 600), st.booleans())
def test_its_own_lists_can_be_written_too(most: int, ranks: int, gap: int, bucketized: bool) -> None:
    built = setup(max(most, 8), 8, data_parallel_size=ranks, multiprocess_dp=False, padding_gap=gap * ranks,
                 bucketized_requests=bucketized)  # fmt: skip
    assume(most * ranks > 32)
    lists = TPU.default(built)
    judging.written_is_read(TPU, built, TPU.accept(built, lists).lists)


def test_a_file_states_what_the_environment_and_flags_do() -> None:
    written = TPU.export(setup(1500, 32), {"tokens": shapes(48, 1500, 2048), "requests": shapes(8, 32)})
    assert written.environment == {
        "MIN_TOKEN_BUCKET": "2048", "VLLM_TPU_BUCKET_PADDING_GAP": "476",
        "ATTN_BUCKETIZED_NUM_REQS": "1", "ATTN_CUSTOM_NUM_REQS_BUCKETS": "8,32",
    }  # fmt: skip
    assert '--additional-config {"compilation_sizes": [48]}' in written.arguments
    config = dict(line.split(": ", 1) for line in written.files["config.yaml"].splitlines())
    assert json.loads(config["additional-config"].strip("'")) == {"compilation_sizes": [48]}
    assert config["max-num-batched-tokens"] == "1500"


@pytest.mark.parametrize(
    ("given_", "match"),
    [
        (Export(arguments=('--additional-config {"compilation_sizes": [0]}',)), "compilation_sizes must be a list"),
        (Export(arguments=("--additional-config {",)), "not valid JSON"),
        (Export(arguments=("--max-num-seqs 16",)), "--max-num-seqs 16 disagrees with max_num_seqs 256"),
        (Export({"MIN_TOKEN_BUCKET": "17"}), "must be a power of two"),
        (
            Export({"ATTN_BUCKETIZED_NUM_REQS": "1", "ATTN_CUSTOM_NUM_REQS_BUCKETS": "32,8"}),
            "CUSTOM_NUM_REQS_BUCKETS: 8 follows 32",
        ),
        (Export({"ATTN_BUCKETIZED_NUM_REQS": "1", "ATTN_CUSTOM_NUM_REQS_BUCKETS": "8,x"}), "with commas"),
        (Export({"MIN_TOKEN_BUCKET": "8192", "VLLM_TPU_BUCKET_PADDING_GAP": "64"}), "leaves no padding"),
    ],
)
def test_what_the_server_refuses_is_an_error(given_: Export, match: str) -> None:
    with pytest.raises(InputError, match=match):
        TPU.read(given_, setup(release="0.29"))


def test_custom_requests_count_only_where_they_are_turned_on() -> None:
    custom = {"ATTN_CUSTOM_NUM_REQS_BUCKETS": "8,32"}
    assert values(TPU.read(Export(custom), setup())["requests"]) == [256]
    assert values(TPU.read(Export(custom | {"ATTN_BUCKETIZED_NUM_REQS": "1"}), setup())["requests"]) == [8, 32, 256]


def test_the_log_of_a_start_has_the_sizes() -> None:
    lines = [
        "INFO Prepared token paddings: [16, 32]",
        "INFO Prepared attn request paddings: [8, 16]",
        "INFO Prepared token paddings: [8, 16, 64]",
        "INFO Precompile worker0 backbone --> {'num_tokens': 16, 'num_reqs': 8, 'shared_attention_metadata': ...}",
        "INFO Precompile worker0 backbone --> {'num_tokens': 24, 'num_reqs': 8}",
        "INFO Precompile compute_logits --> {'num_tokens': 99}",
    ]
    assert TPU.read_log(lines) == {"tokens": shapes(16, 24), "requests": shapes(8, 16)}
    assert TPU.read_log(lines[:3]) == {"tokens": shapes(16, 32), "requests": shapes(8, 16)}
    assert TPU.read_log(["INFO Prepared request paddings: [8]"]) is None


@given(
    st.dictionaries(st.integers(1, 128), st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4),
    st.sampled_from([8, 16]),
)  # fmt: skip
def test_a_proposal_pads_no_more_than_any_other(counts: dict[int, int], most: int, multiple: int) -> None:
    built = setup(128, 8, token_multiple=multiple)
    demands = judging.counted("tokens", counts)
    chosen = TPU.propose(built, {"tokens": demands}, {"tokens": most, "requests": 1})
    assert len(chosen["tokens"]) <= most and chosen["requests"] == shapes(8)
    candidates = range(multiple, 129, multiple)
    assert judging.padded(TPU, built, demands, chosen["tokens"]) == judging.best(TPU, built, demands, candidates, most)
    assert TPU.accept(built, chosen).lists == chosen


def test_a_plan_becomes_sizes() -> None:
    plan = make_plan(setup(512, 32).limits)
    lists = TPU.from_plan(setup(512, 32), plan)
    assert TPU.accept(setup(512, 32), lists).lists == lists
    assert lists["tokens"][-1] == (512,)


def test_what_makes_its_own_lists_is_no_part_of_what_a_list_holds_for() -> None:
    written = TPU.export(setup(), TPU.default(setup()))
    assert from_flags(TPU.settings, {}, written.environment) == {}
