"""SGLang's batches of decode graphs: its own list, what it makes of another, and what it says of both."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import AssumedStepTime
from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import Export, GraphDemand, Lists, Pick, Setup, Shape
from llmc.integrations.settings import Value, complete, flags_of, from_flags
from tests.integrations import judging

SGLANG = bucket_rules("sglang")
REQUESTS = [TrafficRequest(0, 100, 4), TrafficRequest(0, 7, 3)]


def setup(max_num_seqs: int = 2048, max_num_batched_tokens: int = 8192, **own: Value) -> Setup:
    limits = {"max_model_len": 8192, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    return Setup(SGLANG.limits(limits), complete(SGLANG.settings, own))


def batches(*numbers: int) -> Lists:
    return {"decode": judging.shapes(*numbers), "prefill": judging.shapes(4, 8)}


def sizes(shapes: tuple[Shape, ...]) -> list[int]:
    return [size for (size,) in shapes]


@pytest.mark.parametrize(
    ("built", "first", "last", "count"),
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
        (setup(33, enable_two_batch_overlap=True), [2, 4, 8, 12], 32, 7),
        (setup(33, enable_two_batch_overlap=True, cuda_graph_max_bs_decode=64), [2, 4, 8, 12], 34, 8),
    ],
)
def test_its_own_list(built: Setup, first: list[int], last: int, count: int) -> None:
    found = sizes(SGLANG.default(built)["decode"])
    assert (found[: len(first)], found[-1], len(found)) == (first, last, count)


@pytest.mark.parametrize(
    ("built", "last", "count"),
    [
        (setup(), 8192, 58),
        (setup(16, 2048), 2048, 42),
        (setup(16, 100), 96, 12),
        (setup(cuda_graph_max_bs_prefill=512), 512, 30),
    ],
)
def test_its_own_tokens_of_prompts(built: Setup, last: int, count: int) -> None:
    found = sizes(SGLANG.default(built)["prefill"])
    assert (found[:9], found[-1], len(found)) == ([4, 8, 12, 16, 20, 24, 28, 32, 48], last, count)


def test_graphs_of_prompts_can_be_disabled() -> None:
    built = setup(16, cuda_graph_backend_prefill="disabled")
    assert SGLANG.default(built)["prefill"] == ()
    accepted = SGLANG.accept(built, batches(1, 16))
    assert accepted.lists == {"decode": ((1,), (16,)), "prefill": ()}
    assert [drop.reason for drop in accepted.dropped] == ["graphs of prompts are disabled"] * 2
    assert SGLANG.graphs(built, accepted.lists) == 2
    assert SGLANG.propose(built, {}, {"decode": 2, "prefill": 9}) == {"decode": ((16,),), "prefill": ()}
    assert not [demand for demand in SGLANG.demands(built, REQUESTS, AssumedStepTime()) if demand.family == "prefill"]


def test_a_list_is_needed_where_graphs_are_captured() -> None:
    for lists, words in (
        ({"decode": (), "prefill": ((4,),)}, "no batch of decode steps in the list"),
        ({"decode": ((4,),), "prefill": ()}, "no tokens of prompts in the list"),
    ):
        with pytest.raises(InputError, match=words):
            SGLANG.accept(setup(), lists)


def test_a_list_is_cut_at_the_requests_that_can_run() -> None:
    accepted = SGLANG.accept(setup(20), batches(7, 24, 32))
    assert sizes(accepted.lists["decode"]) == [7, 20]
    assert [drop.shape for drop in accepted.dropped] == [(24,), (32,)]
    assert accepted.added == (("decode", (20,)),)


def test_overlapping_batches_are_even() -> None:
    built = setup(20, enable_two_batch_overlap=True)
    accepted = SGLANG.accept(built, batches(3, 8))
    assert sizes(accepted.lists["decode"]) == [8]
    assert [drop.reason for drop in accepted.dropped if drop.family == "decode"] == ["odd, with batch overlap"]
    assert SGLANG.default(built)["prefill"] == accepted.lists["prefill"] == (), "graphs of prompts are off by default"
    with pytest.raises(InputError, match="no batch in the list is an even number up to 20"):
        SGLANG.accept(built, batches(3))


def test_the_next_batch_above_is_taken_or_the_same_alone_without_padding() -> None:
    shapes = ((4,), (16,))
    finder = SGLANG.finder(setup(), "decode", shapes)
    assert [finder.find((n,)) for n in (1, 16, 17)] == [Pick((4,)), Pick((16,)), Pick((17,), "eager")]
    finder = SGLANG.finder(setup(disable_cuda_graph_padding=True), "decode", shapes)
    assert [finder.find((n,)) for n in (3, 4)] == [Pick((3,), "eager"), Pick((4,))]


def test_a_graph_of_more_than_twice_the_tokens_is_not_taken_for_prompts() -> None:
    finder = SGLANG.finder(setup(), "prefill", ((4,), (16,)))
    assert [finder.find((n,)) for n in (1, 2, 4, 7, 8, 17)] == [
        Pick((1,), "eager"), Pick((4,)), Pick((4,)), Pick((7,), "eager"), Pick((16,)), Pick((17,), "eager"),
    ]  # fmt: skip


def test_decode_steps_wait_while_prompts_run() -> None:
    assert list(SGLANG.demands(setup(), REQUESTS, AssumedStepTime())) == [
        GraphDemand("prefill", (107,), 1, 107), GraphDemand("decode", (2,), 2, 4), GraphDemand("decode", (1,), 1, 1),
    ]  # fmt: skip
    long = list(SGLANG.demands(setup(16, 64), [TrafficRequest(0, 150, 1)], AssumedStepTime()))
    assert long == [GraphDemand("prefill", (64,), 2, 128), GraphDemand("prefill", (22,), 1, 22)]


@given(
    st.sets(st.integers(1, 600), min_size=1, max_size=40),
    st.sets(st.integers(1, 9999), min_size=1, max_size=40),
    st.fixed_dictionaries(
        {},
        optional={
            "tp_size": st.integers(1, 8),
            "cuda_graph_backend_prefill": st.sampled_from(["breakable", "disabled", None]),
            "speculative_num_draft_tokens": st.integers(0, 4),
            "disable_cuda_graph_padding": st.booleans(),
        },
    ),
)
def test_what_is_written_is_read(given_sizes: set[int], tokens: set[int], own: dict[str, Value]) -> None:
    built = Setup(setup(256).limits, complete(SGLANG.settings, own))
    lists = {"decode": judging.shapes(*sorted(given_sizes)), "prefill": judging.shapes(*sorted(tokens))}
    lists = dict(SGLANG.accept(built, lists).lists)
    written = SGLANG.export(built, lists)
    assert SGLANG.read(written, built) == lists
    flags = flags_of([word for argument in written.arguments for word in argument.split(" ", 1)])
    assert complete(SGLANG.settings, from_flags(SGLANG.settings, flags, {})) == built.own
    assert flags["--max-running-requests"] == "256"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cuda-graph-bs 4 2 1"], [1, 2, 4]),
        (["--cuda-graph-bs-decode", "8", "16"], [8, 16]),
        (['--cuda-graph-config {"decode": {"bs": [2, 8]}, "prefill": {"backend": "breakable"}}'], [2, 8]),
        (["--tp-size 2", "--cuda-graph-bs-prefill 64"], sizes(SGLANG.default(setup())["decode"])),
    ],
)
def test_every_spelling_of_a_list(arguments: list[str], expected: list[int]) -> None:
    assert sizes(SGLANG.read(Export(arguments=tuple(arguments)), setup())["decode"]) == expected


def test_settings_have_the_names_that_releases_gave_them() -> None:
    flags = flags_of(["--tp", "4", "--cuda-graph-max-bs", "64"])
    assert from_flags(SGLANG.settings, flags, {}) == {"tp_size": 4, "cuda_graph_max_bs_decode": 64}
    assert from_flags(SGLANG.settings, flags_of(["--tensor-parallel-size=8"]), {}) == {"tp_size": 8}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cuda-graph-bs 1", "--cuda-graph-bs-decode 2"], "both state a list"),
        (["--context-length 4096"], "--context-length 4096 disagrees with max_model_len 8192"),
        (["--cuda-graph-bs 0"], "--cuda-graph-bs must be whole numbers"),
        (["--cuda-graph-bs-prefill 8 x"], "--cuda-graph-bs-prefill must be whole numbers"),
        (["--cuda-graph-bs 12345678901234567890"], "--cuda-graph-bs must be whole numbers"),
        (['--cuda-graph-config {"decode": {"bs": "x"}}'], "decode.bs must be a list"),
        (["--cuda-graph-config {"], "not valid JSON"),
        (['--cuda-graph-config {"prefill": {"backend": "disabled"}}'], "state it as --cuda-graph-backend-prefill"),
        (['--cuda-graph-config {"decode": {"max_bs": 9}}'], "state it as --cuda-graph-max-bs-decode"),
        (["--disable-cuda-graph"], "SGLang runs without graphs"),
        (["--disable-prefill-cuda-graph"], "state it as --cuda-graph-backend-prefill disabled"),
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
    assert SGLANG.read_log(["Load weight begin.", text]) == {"decode": ((1,), (2,), (8,)), "prefill": ()}
    prompts = "Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 8], avail mem=1 GB"
    assert SGLANG.read_log([text, prompts]) == {"decode": ((1,), (2,), (8,)), "prefill": ((4,), (8,))}
    assert SGLANG.read_log(["Load weight begin."]) is None


@given(st.dictionaries(st.integers(1, 12), st.integers(1, 9), min_size=1), st.integers(1, 4))
def test_no_list_of_its_length_pads_less_than_a_proposal(counts: dict[int, int], most: int) -> None:
    built = setup(12, cuda_graph_max_bs_decode=12, cuda_graph_backend_prefill="disabled")
    demands = judging.counted("decode", counts)
    chosen = SGLANG.propose(built, {"decode": demands}, {"decode": most, "prefill": 0})["decode"]
    assert len(chosen) <= most and chosen[-1] == (12,)
    least = judging.best(SGLANG, built, demands, range(1, 13), most)
    assert judging.padded(SGLANG, built, demands, chosen) == least


def test_without_padding_the_most_frequent_batches_have_graphs() -> None:
    built, most = (
        setup(disable_cuda_graph_padding=True, cuda_graph_backend_prefill="disabled"),
        {"decode": 2, "prefill": 9},
    )
    demands = judging.counted("decode", {3: 5, 7: 9, 8: 1})
    assert SGLANG.propose(built, {"decode": demands}, most)["decode"] == ((3,), (7,))
    assert SGLANG.propose(built, {}, most)["decode"] == ((256,),)


@given(st.dictionaries(st.integers(1, 16), st.integers(1, 9), min_size=1), st.integers(3, 6))
def test_no_list_of_tokens_of_its_length_pads_less_and_leaves_no_step_behind(counts: dict[int, int], most: int) -> None:
    built = setup(16, 16)
    demands = judging.counted("prefill", counts)
    chosen = SGLANG.propose(built, {"prefill": demands}, {"decode": 1, "prefill": most})["prefill"]
    served = {n: demands[n,] for (n,) in demands if n > 1}

    def padded(shapes: tuple[Shape, ...]) -> int | None:
        """None where a step of 2 to 16 tokens has no graph."""
        finder = SGLANG.finder(built, "prefill", shapes)
        if any(finder.find((n,)).miss for n in range(2, 17)):
            return None
        return sum(finder.find((n,)).shape[0] * demand.steps for n, demand in served.items())

    others = [
        padded(judging.shapes(4, *between, 16))
        for count in range(most - 1)
        for between in combinations(range(5, 16), count)
    ]
    assert len(chosen) <= most and padded(chosen) == min(found for found in others if found is not None)


def test_lists_of_tokens_that_are_too_short_leave_steps_behind() -> None:
    with pytest.raises(InputError, match="at most 11 graphs, but 12 are needed for every step to have one"):
        SGLANG.propose(setup(16), {}, {"decode": 1, "prefill": 11})
    assert len(SGLANG.propose(setup(16), {}, {"decode": 1, "prefill": 12})["prefill"]) == 12
