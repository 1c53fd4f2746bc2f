"""vLLM Neuron's buckets: whole prompts and segments, requests and contexts of decode steps."""

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

NEURON = bucket_rules("vllm-neuron")


def setup(length: int = 4096, tokens: int | None = None, seqs: int = 8, block_size: int = 32, **own: Value) -> Setup:
    limits = {
        "max_model_len": length, "max_num_seqs": seqs, "max_num_batched_tokens": tokens or length,
        "block_size": block_size,
    }  # fmt: skip
    return judging.setup(NEURON, limits, own)


def config(built: Setup, **lists: object) -> Export:
    return Export(arguments=(f"--additional-config {json.dumps({'neuron_config': lists})}",))


@pytest.mark.parametrize(
    ("built", "tokens", "requests"),
    [
        (setup(4096), [128, 256, 512, 1024, 2048, 4096], [1, 2, 4, 8]),
        (setup(5000, seqs=6), [128, 256, 512, 1024, 2048, 4096, 5000], [1, 2, 4, 6]),
        (setup(100, seqs=1), [100], [1]),
        (setup(131072, 2048), [2048], [1, 2, 4, 8]),
        (setup(4096, block_size=128, decode_context_parallel_size=4), [512, 1024, 2048, 4096], [1, 2, 4, 8]),
    ],
)
def test_its_own_lists(built: Setup, tokens: list[int], requests: list[int]) -> None:
    found = NEURON.default(built)
    assert (values(found["tokens"]), values(found["requests"])) == (tokens, requests)
    assert found["context"] == shapes(built.limits.max_model_len)


@pytest.mark.parametrize(
    ("length", "tokens", "match"),
    [
        (4096, 3000, "3000 is not a segment.*512, 1024, 2048, 4096, or 4096, for whole prompts"),
        (32768, 3000, "3000 is not a segment.*set one of 512, 1024, 2048, 4096$"),
        (32768, 32768, "cannot be prefilled whole, only up to 16384"),
    ],
)
def test_limits_that_the_server_refuses_at_start(length: int, tokens: int, match: str) -> None:
    with pytest.raises(InputError, match=match):
        setup(length, tokens)


def test_limits_are_clamped_to_the_length_of_a_sequence() -> None:
    assert NEURON.limits({"max_model_len": 1024}).max_num_batched_tokens == 1024
    assert NEURON.limits({"max_model_len": 8192}).max_num_batched_tokens == 2048


def test_a_prompt_runs_in_segments_while_decodes_wait() -> None:
    built = setup(8192, 512, 2)
    assert judging.steps(NEURON, built, (0.0, 1100, 3), (0.0, 100, 2)) == [
        ("tokens", 512, 1, 512), ("tokens", 512, 1, 512), ("tokens", 76, 1, 76), ("tokens", 100, 1, 100),
        ("requests", 2, 1, 2), ("context", 1152, 1, 1101),
        ("requests", 1, 1, 1), ("context", 1152, 1, 1102),
    ]  # fmt: skip


def test_contexts_are_counted_by_the_tile_of_the_kernel() -> None:
    found = judging.steps(NEURON, setup(8192, 512, 1), (0.0, 250, 12))
    assert found[-2:] == [("context", 256, 6, 251 + 252 + 253 + 254 + 255 + 256), ("context", 384, 5, 1295)]


@pytest.mark.parametrize(
    ("lists", "match"),
    [
        (
            {"tokens": shapes(512), "requests": shapes(8)},
            "num_batched_tokens_buckets ends with 512.*must end with.*4096",
        ),
        ({"tokens": shapes(4096), "requests": shapes(4)}, "num_seqs_buckets ends with 4.*max_num_seqs, 8"),
        ({"tokens": (), "requests": shapes(8)}, "num_batched_tokens_buckets is empty"),
        ({"tokens": shapes(4096), "requests": shapes(8), "context": shapes(100)}, "100 must be a multiple of 128"),
        (
            {"tokens": shapes(4096), "requests": shapes(8), "context": shapes(8192)},
            "8192 must be a multiple of 128 below",
        ),
    ],
)
def test_lists_that_the_server_refuses(lists: dict[str, tuple[tuple[int, ...], ...]], match: str) -> None:
    with pytest.raises(InputError, match=match):
        NEURON.accept(setup(), {"context": (), **lists})


def test_segments_have_one_bucket_of_tokens() -> None:
    with pytest.raises(InputError, match=r"\[512, 2048\], with prefill in segments.*must be \[2048\]"):
        NEURON.accept(setup(8192, 2048), {"tokens": shapes(512, 2048), "requests": shapes(8), "context": ()})


def test_ranks_that_share_a_cache_leave_buckets_out() -> None:
    built = setup(4096, block_size=128, decode_context_parallel_size=4)
    accepted = NEURON.accept(built, {"tokens": shapes(128, 1024, 4096), "requests": shapes(8), "context": ()})
    assert accepted.lists["tokens"] == shapes(1024, 4096)
    assert [drop.shape for drop in accepted.dropped] == [(128,)]
    assert accepted.added == (("context", (4096,)),)
    with pytest.raises(InputError, match="4096 is not a multiple of 384"):
        NEURON.default(setup(4096, block_size=128, decode_context_parallel_size=3))


def test_the_next_bucket_above_is_taken() -> None:
    finder = NEURON.finder(setup(), "requests", shapes(1, 4))
    assert [finder.find((n,)) for n in (1, 2, 5)] == [Pick((1,)), Pick((4,)), Pick((5,), "error")]


def test_graphs_are_prefills_and_pairs_of_requests_and_context_twice_with_drafts() -> None:
    lists = {"tokens": shapes(512, 4096), "requests": shapes(1, 4, 8), "context": shapes(2048, 4096)}
    assert NEURON.graphs(setup(), lists) == 8
    assert NEURON.graphs(setup(num_speculative_tokens=2), lists) == 14


@full
@given(
    st.sets(st.integers(1, 4095), max_size=12),
    st.sets(st.integers(1, 7), max_size=5),
    st.sets(st.integers(1, 31), max_size=5),
    st.booleans(),
)
def test_what_is_written_is_read(tokens: set[int], requests: set[int], contexts: set[int], segments: bool) -> None:
    built = setup(4096, 1024 if segments else None, num_speculative_tokens=len(contexts))
    lists = {
        "tokens": shapes(1024) if segments else shapes(*sorted(tokens), 4096),
        "requests": shapes(*sorted(requests), 8),
        "context": shapes(*sorted(128 * n for n in contexts), 4096),
    }
    assert NEURON.accept(built, lists).lists == lists
    written = judging.written_is_read(NEURON, built, lists)
    assert ("--no-enable-prefix-caching" in written.arguments) is not segments


@pytest.mark.parametrize(
    ("lists", "match"),
    [
        ({"num_batched_tokens_buckets": [512, 256, 4096]}, "num_batched_tokens_buckets: 256 follows 512"),
        ({"num_batched_tokens_buckets": []}, "must be a list of whole numbers"),
        ({"num_seqs_buckets": [True, 8]}, "must be a list of whole numbers"),
        ({"num_seqs_buckets": [1, 2]}, "must end with max_num_seqs, 8"),
        ({"decode_context_length_buckets": [4096]}, "4096 must be below max_model_len 4096"),
        ({"kv_segment_size_buckets": [2048]}, "must be max_num_batched_tokens 4096 alone"),
        (
            {"kv_segment_size_buckets": [4096], "num_batched_tokens_buckets": [512, 4096]},
            "num_batched_tokens_buckets must equal kv_segment_size_buckets",
        ),
    ],
)
def test_a_configuration_that_the_server_refuses_is_an_error(lists: dict[str, object], match: str) -> None:
    with pytest.raises(InputError, match=match):
        NEURON.read(config(setup(), **lists), setup())


def test_other_limits_in_the_flags_are_an_error() -> None:
    with pytest.raises(InputError, match="--max-model-len 2048 disagrees with max_model_len 4096"):
        NEURON.read(Export(arguments=("--max-model-len 2048",)), setup())


def test_a_segment_alone_makes_the_bucket_of_tokens() -> None:
    found = NEURON.read(config(setup(), kv_segment_size_buckets=[4096]), setup())
    assert found["tokens"] == shapes(4096)


def test_the_log_of_a_start_has_the_lists() -> None:
    lines = [
        "INFO Initializing a V1 LLM engine with config: model='m', max_seq_len=8192, tensor_parallel_size=32",
        "INFO Segmented prefill auto-enabled with kv_segment_size_buckets=[2048], num_batched_tokens_buckets=[2048]",
        "INFO Using num_seqs_buckets from config: [1, 4, 8]",
        "INFO Using decode_context_length_buckets from config: [1024, 2048]",
    ]
    assert NEURON.read_log(lines) == {
        "tokens": shapes(2048), "requests": shapes(1, 4, 8), "context": shapes(1024, 2048, 8192),
    }  # fmt: skip
    default = ["Using default num_batched_tokens_buckets: [128, 200]", "Using default num_seqs_buckets: [1, 2]"]
    assert NEURON.read_log(default) == {"tokens": shapes(128, 200), "requests": shapes(1, 2), "context": ()}
    assert NEURON.read_log(lines[:2]) is None


@given(
    st.dictionaries(st.integers(1, 1024), st.integers(1, 9), min_size=1, max_size=10),
    st.dictionaries(st.integers(1, 6), st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_a_proposal_pads_no_more_than_any_other(tokens: dict[int, int], batches: dict[int, int], most: int) -> None:
    built = setup(1024, seqs=6)
    demands = {"tokens": judging.counted("tokens", tokens), "requests": judging.counted("requests", batches)}
    chosen = NEURON.propose(built, demands, dict.fromkeys(("tokens", "requests", "context"), most))
    assert NEURON.accept(built, chosen).lists == chosen
    for family, candidates in (("tokens", range(128, 1025, 128)), ("requests", range(1, 7))):
        assert len(chosen[family]) <= most
        work = judging.padded(NEURON, built, demands[family], chosen[family])
        assert work == judging.best(NEURON, built, demands[family], candidates, most)


def test_a_proposal_with_segments_keeps_the_one_bucket() -> None:
    built = setup(8192, 512)
    demands = {"tokens": judging.counted("tokens", {3: 9, 512: 1})}
    assert NEURON.propose(built, demands, {"tokens": 4, "requests": 1, "context": 1})["tokens"] == shapes(512)


def test_a_plan_becomes_buckets() -> None:
    built = setup(1024)
    lists = NEURON.from_plan(built, make_plan(built.limits))
    assert NEURON.accept(built, lists).lists == lists


def test_drafts_are_part_of_the_context() -> None:
    found = judging.steps(NEURON, setup(8192, 512, 1, num_speculative_tokens=4), (0.0, 250, 4))
    assert found[-2:] == [("context", 256, 2, 255 + 256), ("context", 384, 1, 257)]
