"""TensorRT-LLM's batches of decode graphs: its own list, what it makes of another, and what it says of both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import AssumedStepTime
from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import Export, GraphDemand, Pick, Setup, Shape
from llmc.integrations.settings import Value, complete
from tests.integrations import judging

TRT = bucket_rules("tensorrt-llm")


def setup(max_num_seqs: int = 2048, max_num_batched_tokens: int = 8192, **own: Value) -> Setup:
    limits = {"max_model_len": 8192, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    return Setup(TRT.limits(limits), complete(TRT.settings, own))


def sizes(shapes: tuple[Shape, ...]) -> list[int]:
    return [size for (size,) in shapes]


@pytest.mark.parametrize(
    ("built", "expected"),
    [
        (setup(), [*range(1, 33), 64, 128]),
        (setup(cuda_graph_max_batch_size=1000), [*range(1, 33), 64, 128, 256, 512, 1000]),
        (setup(cuda_graph_max_batch_size=512), [*range(1, 33), 64, 128, 256, 512]),
        (setup(enable_padding=True), [1, 2, 4, *range(8, 129, 8)]),
        (setup(enable_padding=True, cuda_graph_max_batch_size=300), [1, 2, 4, *range(8, 129, 8), 192, 256, 300]),
        (setup(enable_padding=True, cuda_graph_max_batch_size=5), [1, 2, 4, 5]),
        (setup(50), [*range(1, 33)]),
        (setup(50, enable_padding=True), [1, 2, 4, 8, 16, 24, 32, 40, 48, 50]),
        (setup(64, 64, enable_padding=True, max_draft_len=3), [1, 2, 4, 8, 16]),
    ],
)
def test_its_own_list(built: Setup, expected: list[int]) -> None:
    assert sizes(TRT.default(built)["decode"]) == expected


def test_batches_that_cannot_run_are_left_out_and_padding_adds_the_largest_that_can() -> None:
    lists = {"decode": ((4,), (64,), (128,))}
    padded = TRT.accept(setup(50, enable_padding=True), lists)
    assert sizes(padded.lists["decode"]) == [4, 50]
    assert [drop.shape for drop in padded.dropped] == [(64,), (128,)]
    assert padded.added == (("decode", (50,)),)
    assert sizes(TRT.accept(setup(50), lists).lists["decode"]) == [4]


def test_a_batch_without_a_graph_of_its_own_size_runs_eagerly_unless_it_is_padded() -> None:
    finder = TRT.finder(setup(), "decode", ((4,), (8,)))
    assert [finder.find((n,)) for n in (4, 5)] == [Pick((4,)), Pick((5,), "eager")]
    finder = TRT.finder(setup(enable_padding=True), "decode", ((4,), (8,)))
    assert [finder.find((n,)) for n in (4, 5, 9)] == [Pick((4,)), Pick((8,)), Pick((9,), "eager")]


def test_only_steps_without_prompts_can_have_graphs() -> None:
    requests = [TrafficRequest(0, 60, 5), TrafficRequest(0, 50, 3)]
    whole = list(TRT.demands(setup(4, 64), requests, AssumedStepTime()))
    assert [(demand.shape, demand.steps) for demand in whole] == [((2,), 2), ((1,), 1)]
    with pytest.raises(InputError, match="switch chunked prefill on"):
        list(TRT.demands(setup(4, 64), [TrafficRequest(0, 65, 5)], AssumedStepTime()))
    cut = list(TRT.demands(setup(4, 64, enable_chunked_prefill=True), [TrafficRequest(0, 65, 5)], AssumedStepTime()))
    assert cut == [GraphDemand("decode", (1,), 4, 4)]


@given(st.sets(st.integers(1, 600), min_size=1, max_size=40), st.booleans(), st.booleans())
def test_what_is_written_is_read(given_sizes: set[int], padding: bool, chunked: bool) -> None:
    built = setup(600, enable_padding=padding, enable_chunked_prefill=chunked)
    lists = TRT.accept(built, {"decode": tuple((n,) for n in sorted(given_sizes))}).lists
    assert TRT.read(TRT.export(built, lists), built) == lists


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda_graph_config:\n  batch_sizes: [8, 1]\n", [1, 8]),
        ('{"cuda_graph_config": {"batch_sizes": [8], "max_batch_size": 8}}', [8]),
        ("cuda_graph_config: null\n", []),
        ("cuda_graph_config: {}\n", [*range(1, 33), 64, 128]),
        ("kv_cache_config:\n  dtype: fp8\n", [*range(1, 33), 64, 128]),
    ],
)
def test_a_file_states_the_list(text: str, expected: list[int]) -> None:
    assert sizes(TRT.read(Export(files={"extra.yaml": text}), setup())["decode"]) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cuda_graph_config:\n  batch_sizes: [0]\n", "extra.yaml: cuda_graph_config.batch_sizes must be a list"),
        ("cuda_graph_config:\n  batch_sizes: 8\n", "batch_sizes must be a list"),
        ("cuda_graph_config: [1]\n", "must be a mapping"),
        ("cuda_graph_config:\n  enable_padding: true\n", "enable_padding is true, but the setting .* is false"),
        ("cuda_graph_config:\n  batch_sizes: [4]\n  max_batch_size: 8\n", "8 is not the largest of batch_sizes, 4"),
        ("max_batch_size: 9\n", "--max-batch-size 9 disagrees with max_num_seqs 2048"),
        ("a: [1\n", "extra.yaml: not valid YAML"),
        ("a: &x [1]\nb: *x\n", "YAML aliases"),
        ("- 1\n", "is a mapping of names"),
        ("[" * 100_000, "nested too deep|not valid YAML"),
    ],
)
def test_a_file_that_it_refuses_is_an_error(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        TRT.read(Export(files={"extra.yaml": text}), setup())


def test_the_log_of_a_start_has_the_list() -> None:
    line = (
        "[TRT-LLM] [I] PyTorchConfig(use_cuda_graph=True, cuda_graph_batch_sizes=[1, 2, 8], cuda_graph_max_batch_size=8"
    )
    assert TRT.read_log(["[TensorRT-LLM] TensorRT-LLM version: 1.1.0rc3", line]) == {"decode": ((1,), (2,), (8,))}
    assert TRT.read_log(["nothing"]) is None


@given(st.dictionaries(st.integers(1, 12), st.integers(1, 9), min_size=1), st.integers(1, 4))
def test_no_list_of_its_length_pads_less_than_a_proposal(counts: dict[int, int], most: int) -> None:
    built = setup(12, enable_padding=True)
    demands = judging.counted("decode", counts)
    chosen = TRT.propose(built, {"decode": demands}, {"decode": most})["decode"]
    assert len(chosen) <= most and chosen[-1] == (12,)
    least = judging.best(TRT, built, demands, range(1, 13), most)
    assert judging.padded(TRT, built, demands, chosen) == least


def test_without_padding_the_most_frequent_batches_have_graphs() -> None:
    demands = {(n,): GraphDemand("decode", (n,), steps, n * steps) for n, steps in ((3, 5), (7, 9), (8, 1), (500, 99))}
    assert TRT.propose(setup(), {"decode": demands}, {"decode": 2}) == {"decode": ((3,), (7,))}
