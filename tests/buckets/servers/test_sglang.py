"""SGLang's batches of decode graphs: its own list, what it makes of another, and what it says of both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.servers import create
from llmc.buckets.servers.base import Demand, Export, Found, Setup, Shape
from llmc.buckets.servers.settings import Value, complete, flags_of, from_flags
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import AssumedStepTime
from llmc.errors import InputError
from tests.buckets.servers import judging

SGLANG = create("sglang")


def setup(max_num_seqs: int = 2048, **own: Value) -> Setup:
    return Setup(SGLANG.limits({"max_model_len": 8192, "max_num_seqs": max_num_seqs}), complete(SGLANG.settings, own))


def sizes(shapes: tuple[Shape, ...]) -> list[int]:
    return [size for (size,) in shapes]


@pytest.mark.parametrize(
    ("made", "first", "last", "count"),
    [
        (setup(gpu_memory_gib=16), [1, 2, 4, 8], 8, 4),
        (setup(gpu_memory_gib=24), [1, 2, 4, 8, 12, 16], 48, 10),
        (setup(gpu_memory_gib=40), [1, 2, 4, 8], 32, 8),
        (setup(gpu_memory_gib=40, tp_size=4), [1, 2, 4, 8], 160, 24),
        (setup(), [1, 2, 4, 8, 12, 16, 24], 256, 36),
        (setup(tp_size=8), [1, 2, 4], 512, 52),
        (setup(gpu_memory_gib=192), [1, 2, 4], 512, 52),
        (setup(cuda_graph_max_bs_decode=1000), [1, 2, 4], 1000, 68),
        (setup(speculative_num_draft_tokens=4), [1, 2, 3, 4, 5, 6, 7, 8, 10, 12], 256, 51),
        (setup(disable_cuda_graph_padding=True), [1, 2, 3, 4, 5], 256, 256),
        (setup(20), [1, 2, 4, 8, 12, 16, 20], 20, 7),
        (setup(1), [1], 1, 1),
        (setup(33, enable_two_batch_overlap=True), [2, 4, 8, 12], 34, 8),
    ],
)
def test_its_own_list(made: Setup, first: list[int], last: int, count: int) -> None:
    found = sizes(SGLANG.default(made)["decode"])
    assert (found[: len(first)], found[-1], len(found)) == (first, last, count)


def test_a_list_is_cut_at_the_requests_that_can_run() -> None:
    accepted = SGLANG.accept(setup(20), {"decode": ((7,), (24,), (32,))})
    assert sizes(accepted.lists["decode"]) == [7, 20]
    assert [drop.shape for drop in accepted.dropped] == [(24,), (32,)]
    assert accepted.added == (("decode", (20,)),)


def test_overlapping_batches_are_even() -> None:
    made = setup(20, enable_two_batch_overlap=True)
    accepted = SGLANG.accept(made, {"decode": ((3,), (8,))})
    assert sizes(accepted.lists["decode"]) == [8]
    assert [drop.reason for drop in accepted.dropped] == ["odd, with batch overlap"]
    with pytest.raises(InputError, match="no batch in the list is an even number up to 20"):
        SGLANG.accept(made, {"decode": ((3,),)})


def test_the_next_batch_above_is_taken_or_the_same_alone_without_padding() -> None:
    shapes = ((4,), (16,))
    finder = SGLANG.finder(setup(), "decode", shapes)
    assert [finder.find((n,)) for n in (1, 16, 17)] == [Found((4,)), Found((16,)), Found((17,), "eager")]
    finder = SGLANG.finder(setup(disable_cuda_graph_padding=True), "decode", shapes)
    assert [finder.find((n,)) for n in (3, 4)] == [Found((3,), "eager"), Found((4,))]


def test_decode_steps_wait_while_prompts_run() -> None:
    requests = [TrafficRequest(0, 100, 4), TrafficRequest(0, 7, 3)]
    assert list(SGLANG.demands(setup(), requests, AssumedStepTime())) == [
        Demand("decode", (2,), 2, 4), Demand("decode", (1,), 1, 1),
    ]  # fmt: skip


@given(
    st.sets(st.integers(1, 600), min_size=1, max_size=40),
    st.fixed_dictionaries(
        {},
        optional={
            "tp_size": st.integers(1, 8),
            "speculative_num_draft_tokens": st.integers(0, 4),
            "disable_cuda_graph_padding": st.booleans(),
        },
    ),
)
def test_what_is_written_is_read(given_sizes: set[int], own: dict[str, Value]) -> None:
    made = setup(256, **own)
    lists = SGLANG.accept(made, {"decode": tuple((n,) for n in sorted(given_sizes))}).lists
    written = SGLANG.export(made, lists)
    assert SGLANG.read(written, made) == lists
    flags = flags_of([word for argument in written.arguments for word in argument.split(" ", 1)])
    assert complete(SGLANG.settings, from_flags(SGLANG.settings, flags, {})) == made.own
    assert flags["--max-running-requests"] == "256"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cuda-graph-bs 4 2 1"], [1, 2, 4]),
        (["--cuda-graph-bs-decode", "8", "16"], [8, 16]),
        (['--cuda-graph-config {"decode": {"bs": [2, 8]}, "prefill": {"backend": "disabled"}}'], [2, 8]),
        (["--tp-size 2"], sizes(SGLANG.default(setup())["decode"])),
    ],
)
def test_every_spelling_of_a_list(arguments: list[str], expected: list[int]) -> None:
    assert sizes(SGLANG.read(Export(arguments=tuple(arguments)), setup())["decode"]) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cuda-graph-bs 1", "--cuda-graph-bs-decode 2"], "both state a list"),
        (["--context-length 4096"], "--context-length 4096 disagrees with max_model_len 8192"),
        (["--cuda-graph-bs 0"], "--cuda-graph-bs must be whole numbers"),
        (["--cuda-graph-bs 12345678901234567890"], "--cuda-graph-bs must be whole numbers"),
        (['--cuda-graph-config {"decode": {"bs": "x"}}'], "decode.bs must be a list"),
        (["--cuda-graph-config {"], "not valid JSON"),
    ],
)
def test_a_list_that_it_refuses_is_an_error(arguments: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        SGLANG.read(Export(arguments=tuple(arguments)), setup())


@pytest.mark.parametrize(
    "text",
    [
        "[2026-04-27 02:36:06] Capture cuda graph bs [1, 2, 8]",
        "[08:21:55 TP0] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, bs=[1, 2, 8], ",
        "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2, 8], avail mem=73.10 GB",
    ],
)
def test_the_log_of_a_start_has_the_list(text: str) -> None:
    assert SGLANG.read_log(["Load weight begin.", text]) == {"decode": ((1,), (2,), (8,))}
    assert SGLANG.read_log(["Capture target prefill CUDA graph begin. num_tokens=[4, 8]"]) is None


@given(st.dictionaries(st.integers(1, 12), st.integers(1, 9), min_size=1), st.integers(1, 4))
def test_no_list_of_its_length_pads_less_than_a_proposal(counts: dict[int, int], most: int) -> None:
    made = setup(12, cuda_graph_max_bs_decode=12)
    demands = judging.counted("decode", counts)
    chosen = SGLANG.propose(made, {"decode": demands}, {"decode": most})["decode"]
    assert len(chosen) <= most and chosen[-1] == (12,)
    least = judging.best(SGLANG, made, demands, range(1, 13), most)
    assert judging.padded(SGLANG, made, demands, chosen) == least


def test_without_padding_the_most_frequent_batches_have_graphs() -> None:
    made = setup(disable_cuda_graph_padding=True)
    demands = {(n,): Demand("decode", (n,), steps, n * steps) for n, steps in ((3, 5), (7, 9), (8, 1))}
    assert SGLANG.propose(made, {"decode": demands}, {"decode": 2}) == {"decode": ((3,), (7,))}
    assert SGLANG.propose(made, {}, {"decode": 2}) == {"decode": ((256,),)}
