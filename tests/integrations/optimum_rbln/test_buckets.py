"""Batches of decode graphs on Rebellions' NPUs: the own list, what is made of another, and what is said of both."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import AssumedStepTime
from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import Export, GraphDemand, Pick, Setup, Shape
from llmc.integrations.settings import Value, complete, flags_of, from_flags
from tests.integrations import judging

RBLN = bucket_rules("optimum-rbln")
STRATEGY, MANUAL = "--rbln-decode-batch-bucket-strategy", "--rbln-decode-batch-bucket-manual-buckets"


def setup(max_num_seqs: int = 32, **own: Value) -> Setup:
    return Setup(RBLN.limits({"max_model_len": 8192, "max_num_seqs": max_num_seqs}), complete(RBLN.settings, own))


def sizes(shapes: tuple[Shape, ...]) -> list[int]:
    return [size for (size,) in shapes]


@pytest.mark.parametrize(
    ("built", "expected"),
    [
        (setup(), [32]),
        (setup(decode_batch_bucket_min=2, decode_batch_bucket_limit=4), [4, 8, 16, 32]),
        (setup(decode_batch_bucket_limit=99), [1, 2, 4, 8, 16, 32]),
        (setup(33, decode_batch_bucket_limit=3, decode_batch_bucket_step=3), [3, 11, 33]),
        (
            setup(
                16, decode_batch_bucket_strategy="linear", decode_batch_bucket_min=2, decode_batch_bucket_step=4,
                decode_batch_bucket_limit=32,
            ),
            [4, 8, 12, 16],
        ),
        (setup(33, pipeline_parallel_size=4), [8]),
    ],
)  # fmt: skip
def test_its_own_list(built: Setup, expected: list[int]) -> None:
    assert sizes(RBLN.default(built)["decode"]) == expected


@pytest.mark.parametrize(
    ("built", "words"),
    [
        (setup(decode_batch_bucket_min=33), "decode_batch_bucket_min 33 is above 32"),
        (setup(decode_batch_bucket_step=1), "must be above 1 to divide by"),
        (setup(2, pipeline_parallel_size=4), "max_num_seqs 2 is below pipeline_parallel_size 4"),
    ],
)
def test_settings_that_end_the_start(built: Setup, words: str) -> None:
    with pytest.raises(InputError, match=words):
        RBLN.default(built)


def test_the_largest_batch_is_that_of_all_requests() -> None:
    assert sizes(RBLN.accept(setup(), {"decode": ((3,), (32,))}).lists["decode"]) == [3, 32]
    for largest, words in ((16, "16 must be 32, .*; add 32"), (64, "64 must be 32, .*; remove those above 32")):
        with pytest.raises(InputError, match=words):
            RBLN.accept(setup(), {"decode": ((largest,),)})
    with pytest.raises(InputError, match="prefill_chunk_size 100 is not a multiple of 64"):
        RBLN.accept(setup(prefill_chunk_size=100), {"decode": ((32,),)})


def test_the_next_batch_above_is_taken() -> None:
    finder = RBLN.finder(setup(), "decode", ((4,), (32,)))
    assert [finder.find((n,)) for n in (1, 5, 32)] == [Pick((4,)), Pick((32,)), Pick((32,))]


@pytest.mark.parametrize(("method", "expected"), [("ngram", 5), ("eagle3", 3)])
def test_a_batch_has_a_graph_with_drafts_and_one_without_unless_all_steps_draft(method: str, expected: int) -> None:
    built = setup(num_speculative_tokens=3, speculative_method=method, speculative_model="drafts")
    lists = {"decode": ((4,), (32,))}
    assert RBLN.graphs(setup(), lists) == 3 and RBLN.graphs(built, lists) == expected
    flag = f'--speculative-config {{"num_speculative_tokens": 3, "method": "{method}", "model": "drafts"}}'
    assert flag in RBLN.export(built, lists).arguments


def test_a_prompt_runs_alone_and_stages_share_the_requests() -> None:
    requests = [TrafficRequest(0, 9, 3)] * 3
    assert list(RBLN.demands(setup(4), requests, AssumedStepTime())) == [GraphDemand("decode", (3,), 2, 6)]
    staged = list(RBLN.demands(setup(4, pipeline_parallel_size=2), requests, AssumedStepTime()))
    assert staged == [GraphDemand("decode", (2,), 2, 4), GraphDemand("decode", (1,), 2, 2)]


@given(st.sets(st.integers(1, 63), max_size=20), st.integers(1, 3))
def test_what_is_written_is_read(given_sizes: set[int], stages: int) -> None:
    built = setup(64 * stages, pipeline_parallel_size=stages, decode_batch_bucket_strategy="manual")
    lists = RBLN.accept(built, {"decode": tuple((n,) for n in sorted(given_sizes | {64}))}).lists
    written = RBLN.export(built, lists)
    assert RBLN.read(written, built) == lists
    for part in (
        Export(environment=written.environment),
        Export(arguments=written.arguments),
        Export(files=written.files),
    ):
        assert RBLN.read(part, built) == lists
    flags = flags_of([word for argument in written.arguments for word in argument.split(" ", 1)])
    assert complete(RBLN.settings, from_flags(RBLN.settings, flags, written.environment)) == built.own
    config = json.loads(written.files["config.json"])
    assert (config["batch_size"], config["decoder_batch_sizes"][0]) == (64, 64)


@pytest.mark.parametrize(
    ("given_export", "words"),
    [
        (Export(arguments=(f"{MANUAL} 1 32",)), f"{MANUAL} is only read with {STRATEGY} manual"),
        (
            Export(arguments=('--additional-config {"decode_batch_bucket_manual_buckets": [1]}',)),
            "is only read with decode_batch_bucket_strategy manual",
        ),
        (Export(arguments=(f"{STRATEGY} manual",)), f"{STRATEGY} manual needs {MANUAL}"),
        (Export(arguments=(f"{STRATEGY} manual", f"{MANUAL} x")), f"{MANUAL} must be whole numbers"),
        (
            Export(arguments=(f"{STRATEGY} manual", f"{MANUAL} 32"), files={"c.json": '{"decoder_batch_sizes": [1]}'}),
            "state different lists",
        ),
        (Export(files={"c.json": '{"decoder_batch_sizes": []}'}), "c.json: decoder_batch_sizes must be a list"),
    ],
)
def test_a_list_that_it_refuses_is_an_error(given_export: Export, words: str) -> None:
    with pytest.raises(InputError, match=words):
        RBLN.read(given_export, setup())


def test_the_list_may_be_in_flags() -> None:
    given_flags = Export(arguments=(f"{STRATEGY} manual", f"{MANUAL} 4 32"))
    assert RBLN.read(given_flags, setup()) == {"decode": ((4,), (32,))}


def test_without_a_list_it_is_its_own() -> None:
    assert RBLN.read(Export(arguments=(f"{STRATEGY} exponential",)), setup()) == RBLN.default(setup())


def test_the_log_of_a_start_has_the_list() -> None:
    text = "INFO Using ManualBucketingManager. Decode batch buckets: [4, 12, 32]"
    assert RBLN.read_log(["start", text]) == {"decode": ((4,), (12,), (32,))}
    assert RBLN.read_log(["start"]) is None


@given(st.dictionaries(st.integers(1, 12), st.integers(1, 9), min_size=1), st.integers(1, 4))
def test_no_list_of_its_length_pads_less_than_a_proposal(counts: dict[int, int], most: int) -> None:
    built = setup(12)
    demands = judging.counted("decode", counts)
    chosen = RBLN.propose(built, {"decode": demands}, {"decode": most})["decode"]
    assert len(chosen) <= most and chosen[-1] == (12,)
    least = judging.best(RBLN, built, demands, range(1, 13), most)
    assert judging.padded(RBLN, built, demands, chosen) == least
