"""vLLM's capture sizes: its own list, what it makes of a list from outside, and what it says of both."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.servers import create
from llmc.buckets.servers.base import Demand, Export, Found, Setup, Shape
from llmc.buckets.servers.settings import Value, complete
from llmc.errors import InputError

VLLM = create("vllm")


def setup(max_num_seqs: int = 256, max_num_batched_tokens: int = 8192, **own: Value) -> Setup:
    limits = {"max_model_len": 8192, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    return Setup(VLLM.limits(limits), complete(VLLM.settings, own))


def sizes(shapes: tuple[Shape, ...]) -> list[int]:
    return [size for (size,) in shapes]


@pytest.mark.parametrize(
    ("made", "first", "last", "count"),
    [
        (setup(), [1, 2, 4, 8, 16], 512, 51),
        (setup(8), [1, 2, 4, 8, 16], 16, 5),
        (setup(1), [1, 2], 2, 2),
        (setup(128), [1, 2, 4, 8], 256, 35),
        (setup(256, 300), [1, 2, 4, 8], 288, 37),
        (setup(max_cudagraph_capture_size=8192), [1, 2, 4], 8192, 531),
        (setup(8, num_speculative_tokens=2), [3, 6, 9, 18], 48, 8),
    ],
)
def test_its_own_list(made: Setup, first: list[int], last: int, count: int) -> None:
    found = sizes(VLLM.default(made)["tokens"])
    assert (found[: len(first)], found[-1], len(found)) == (first, last, count)


def test_a_list_is_cut_at_the_tokens_of_a_step_and_rounded_to_drafts() -> None:
    accepted = VLLM.accept(setup(8, 64, num_speculative_tokens=2), {"tokens": ((1,), (8,), (30,), (64,), (65,))})
    assert sizes(accepted.lists["tokens"]) == [3, 9, 30]
    assert {drop.shape for drop in accepted.dropped} == {(1,), (8,), (64,), (65,)}
    with pytest.raises(InputError, match="at or below max_num_batched_tokens 64"):
        VLLM.accept(setup(8, 64), {"tokens": ((65,),)})


def test_the_next_size_above_is_taken_and_a_larger_step_runs_eagerly() -> None:
    finder = VLLM.finder(setup(), "tokens", ((4,), (16,)))
    assert [finder.find((n,)) for n in (1, 4, 5, 17)] == [
        Found((4,)), Found((4,)), Found((16,)), Found((17,), "eager"),
    ]  # fmt: skip


def test_graphs_count_decode_steps_apart() -> None:
    lists = {"tokens": ((1,), (8,), (64,))}
    counts = {mode: VLLM.graphs(setup(8, cudagraph_mode=mode), lists) for mode in VLLM.settings[2].choices}
    assert counts == {"NONE": 0, "PIECEWISE": 3, "FULL": 3, "FULL_DECODE_ONLY": 2, "FULL_AND_PIECEWISE": 5}


@given(st.sets(st.integers(1, 2048), min_size=1, max_size=40), st.integers(0, 4))
def test_what_is_written_is_read(given_sizes: set[int], drafts: int) -> None:
    made = setup(num_speculative_tokens=drafts)
    lists = VLLM.accept(made, {"tokens": tuple((n,) for n in sorted(given_sizes))}).lists
    written = VLLM.export(made, lists)
    assert VLLM.read(written, made) == lists
    assert json.loads(written.files["config.yaml"].split("'")[1])["cudagraph_capture_sizes"] == sizes(lists["tokens"])


@pytest.mark.parametrize("text", ['{"cudagraph_capture_sizes": []}', '{"cudagraph_capture_sizes": [0]}', "{", "[]"])
def test_a_flag_that_vllm_refuses_is_an_error(text: str) -> None:
    with pytest.raises(InputError, match="--compilation-config"):
        VLLM.read(Export(arguments=(f"--compilation-config {text}",)), setup())


def test_the_log_of_a_start_has_the_list() -> None:
    lines = ["INFO Loading", "compilation_config={'mode': 3, 'cudagraph_capture_sizes': [4, 2, 1], 'x': 1}"]
    assert VLLM.read_log(lines) == {"tokens": ((1,), (2,), (4,))}
    assert VLLM.read_log(lines[:1]) is None


@given(st.dictionaries(st.integers(1, 64), st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 6))
def test_a_proposal_pads_no_more_than_any_other_list_of_its_length(counts: dict[int, int], most: int) -> None:
    made = setup(32)
    demands = {(n,): Demand("tokens", (n,), steps, n * steps) for n, steps in counts.items()}
    chosen = VLLM.propose(made, {"tokens": demands}, {"tokens": most})["tokens"]
    assert len(chosen) <= most and chosen[-1] == (64,)

    def padded(shapes: tuple[Shape, ...]) -> int:
        finder = VLLM.finder(made, "tokens", shapes)
        return sum(finder.find(shape).shape[0] * demand.steps for shape, demand in demands.items())

    spread = tuple(sorted({(max(1, 64 * (place + 1) // most),) for place in range(most)}))
    assert padded(chosen) <= padded(spread)
